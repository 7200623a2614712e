"""Virtual machines with a software RDMA device, and the tests that run in them."""
