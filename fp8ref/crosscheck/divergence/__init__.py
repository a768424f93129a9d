"""Find the first value in which two trainings differ, and the clause that explains it (B-10).

``live`` trains two backends side by side; ``from_runs`` continues two recorded runs. Both compare
``step_values`` in one order, and ``explain`` the first ``difference``.
"""
