"""Backends of gdn_multi, one folder each; see docs/adding_a_backend.md.

In a checkout this folder lies beside ``gdn_multi/``; installed it is ``gdn_multi.backends``.
"""
