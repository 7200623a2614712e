"""Table simulation, policies for dynamic orders, and searches for better orders."""
