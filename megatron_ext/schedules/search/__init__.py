"""Simulation of tables, policies of dynamic orders, and searches for better orders."""
