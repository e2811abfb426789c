import pytest

from workbench.errors import SessionError
from workbench.session.ranks import check_ranks, describe_ranks, parse_ranks, rank_label


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0,2-3", (0, 2, 3)), (" 3 , 1-2 ", (1, 2, 3)), ("1,1", (1,)), ("2-2", (2,))]
)
def test_parse(text, ranks):
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 3), (0, 1, 2, 3), (0, 2)])
def test_label_parses_back(ranks):
    assert parse_ranks(rank_label(ranks), 4) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0;1", "1.5"])
def test_what_is_not_a_rank(text):
    with pytest.raises(SessionError, match="is not a rank"):
        parse_ranks(text, 4)


def test_unknown_rank_says_both_numbers():
    with pytest.raises(SessionError, match=r"rank 4 does not exist.*4 engines.*0 to 3"):
        parse_ranks("0,4", 4)


def test_no_rank_and_all_ranks():
    assert check_ranks(None, 3) == (0, 1, 2)
    with pytest.raises(SessionError, match="no rank is named"):
        check_ranks([], 3)


def test_sentences():
    assert describe_ranks([1]) == "rank 1"
    assert describe_ranks([0, 1, 3]) == "ranks 0-1,3"
