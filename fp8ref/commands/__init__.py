"""The commands of ``fp8ref``, a module for each; ``runs`` holds export, report, compare and replay.

A module's ``add`` declares the options. What the command needs is imported when it runs, so that
--help is fast.
"""
