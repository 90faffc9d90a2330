"""Adapters to other libraries, which are optional dependencies."""
