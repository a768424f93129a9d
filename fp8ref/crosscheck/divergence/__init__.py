"""Find where two trainings first diverge: step, layer, role, GEMM, element, and the clause that explains it (SEMANTICS B-10).

``live`` trains two backends side by side; ``from_runs`` continues two recorded runs. Both compare
``step_values`` in one order, and ``explain`` the first ``difference``.
"""
