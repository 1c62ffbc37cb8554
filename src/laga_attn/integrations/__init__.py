"""Adapters that bring LAGA into other frameworks; each is imported only when asked for."""
