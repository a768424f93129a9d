from fp8ref.shared.tables import Listing, aligned, as_html


def test_text_is_aligned_by_its_column():
    text = aligned(["name", ">n"], [["a", "1"], ["long name", "1,000"]])
    assert text.splitlines() == ["name           n", "a              1", "long name  1,000"]


def test_html_escapes_its_texts_and_aligns_numbers():
    html = as_html(["<a>", ">n"], [["x & y", "1"], [">a", ">1"]])
    assert "<th" in html
    assert "&lt;a&gt;" in html
    assert "x &amp; y" in html
    assert html.count("text-align:right") == 3
    assert ">&gt;a<" in html
    assert ">&gt;1<" in html
    assert ">n<" in html


def test_a_listing_is_a_mapping_that_shows_its_lines():
    listing = Listing({"a": 1, "b": 2}, {"b": "the second", "a": "the first", "c": "no entry"})
    assert dict(listing) == {"a": 1, "b": 2}
    assert (listing["a"], len(listing), "c" in listing) == (1, 2, False)
    assert repr(listing).splitlines()[1:] == ["a     the first", "b     the second"]
    assert "the second" in listing._repr_html_()
