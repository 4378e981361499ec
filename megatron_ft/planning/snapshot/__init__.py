"""Snapshots: decides which operators each iteration captures, and which nodes keep copies."""
