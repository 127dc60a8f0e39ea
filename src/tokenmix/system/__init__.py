"""Shared basics that depend on no other part of the library: files, configs, text, the machine."""
