from matplotlib.colors import same_color

from fp8ref import plots
from fp8ref.plots import style


def test_a_legend_hides_the_grid_behind_it_and_takes_matplotlibs_keywords():
    ax = plots.figure()[1][0]
    ax.plot([0, 1], label="one")
    style.legend(ax, title="which", fontsize=6)
    made = ax.get_legend()
    frame = made.get_frame()
    assert frame.get_visible()
    assert same_color(frame.get_facecolor()[:3], "white")
    assert frame.get_alpha() == 0.9
    assert made.get_title().get_text() == "which"
    assert made.get_texts()[0].get_fontsize() == 6


def test_layers_differ_in_every_look_and_cover_less_and_less():
    made = style.layers(4)
    for key in ("color", "linestyle", "marker"):
        assert len({str(look[key]) for look in made}) == 4
    for key in ("linewidth", "markersize"):
        assert [look[key] for look in made] == sorted({look[key] for look in made}, reverse=True)
    assert [look["color"] for look in made] == [look["color"] for look in style.looks(4)]


def test_one_layer_is_a_line_too():
    assert len(style.layers(1)) == 1
