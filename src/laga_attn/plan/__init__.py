"""The planner: bytes, memory, FLOPs and time of a configuration before anybody books a cluster for it."""
