"""The commands of ``fp8ref``, a module for each; ``runs`` holds export, report, compare and replay.

A module's ``add`` declares options; what it needs is imported when it runs: --help is fast.
"""
