"""Membership, leases, assignment, positions, and the rebalancer."""
