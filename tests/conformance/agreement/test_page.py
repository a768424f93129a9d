"""docs/agreement.md is what docs/scripts/agreement.py writes."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_of_all_policies_is_what_they_make():
    spec = importlib.util.spec_from_file_location("agreement", DOCS / "scripts" / "agreement.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.written()
    assert (DOCS / "agreement.md").read_text(encoding="utf-8") == page
    assert all(f"`{name}`" in page for name in module.POLICIES)
