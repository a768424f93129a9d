"""Where two trainings first part: step, layer, role, GEMM and element, and the clause that explains it (SEMANTICS B-10)."""
