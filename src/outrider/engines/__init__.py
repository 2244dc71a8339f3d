"""Adapters, one package for each engine; each knows one engine, and none knows another."""
