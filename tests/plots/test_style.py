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
