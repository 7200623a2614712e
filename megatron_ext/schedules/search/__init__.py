"""Table simulation, policies for dynamic orders, and the search for better orders."""
