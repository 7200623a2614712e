"""Simulation of tables, policies that choose while a step runs, and searches for better orders."""
