"""Virtual machines with an RDMA device made of software, and the tests that run in them."""
