import pytest

from tiergate_adapters.place import Place


@pytest.mark.parametrize("uri", ["s3://b/run/a", "s3://b/run/a/"])
def test_a_slash_at_the_end_makes_no_difference(uri: str) -> None:
    place = Place.of(uri)
    assert place == Place("b", "run/a/")
    assert str(place) == "s3://b/run/a"
    assert place.key("x") == "run/a/x"
    assert place.below("step-1") == Place("b", "run/a/step-1/")


@pytest.mark.parametrize("uri", ["s3://b", "s3://b/"])
def test_a_whole_bucket_is_a_place(uri: str) -> None:
    assert Place.of(uri) == Place("b", "")
    assert Place.of(uri).key("x") == "x"
    assert str(Place.of(uri)) == "s3://b"


@pytest.mark.parametrize("uri", ["", "b/run", "s3:///run", "/tmp/run", "S3://b/run"])
def test_other_texts_name_no_place(uri: str) -> None:
    with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
        Place.of(uri)
