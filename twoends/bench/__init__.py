"""Measurements that say on which machine, of which build, how often, and with what spread."""
