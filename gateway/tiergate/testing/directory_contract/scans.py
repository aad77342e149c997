"""Scans in the order of keys, whatever their length."""

from tiergate.directory.base import Directory, Seen
from tiergate.model import (
    NO_BASE,
    State,
)
from tiergate.testing.directory_contract.values import (
    AWKWARD_KEYS,
    BUCKET,
    keys_of,
    make_intent,
    make_version,
    object_name,
    pending_of,
    put,
    put_clean,
    record_of,
)


class Scans:
    """Scans in the order of keys, whatever their length."""

    async def test_records_are_those_of_the_keys_asked_for_in_their_order(self, directory: Directory) -> None:
        await put_clean(directory, object_name("a"), "v1", "o1")
        await put(directory, object_name("b"), "v2")
        await directory.delete(object_name("c"), make_intent())
        await put(directory, object_name("d", "bucket2"), "v3")
        wanted = [await record_of(directory, object_name(key)) for key in "cab"]
        assert await directory.records(BUCKET, ["c", "none", "a", "d", "b"]) == wanted
        assert await directory.records(BUCKET, []) == []

    async def test_records_of_many_keys_are_all_found(self, directory: Directory) -> None:
        for key in AWKWARD_KEYS:
            await put(directory, object_name(key), key[:4])
        asked = [key for each in AWKWARD_KEYS for key in (each, f"none-{each[:9]}")] * 3
        assert keys_of(await directory.records(BUCKET, asked)) == AWKWARD_KEYS * 3

    async def test_scan_pages_through_in_key_order(self, directory: Directory) -> None:
        for key in reversed(AWKWARD_KEYS):
            await put(directory, object_name(key), key[:4])
        await put(directory, object_name("a", "bucket2"), "z")
        await put(directory, object_name("a", "bucke"), "z")
        found: list[str] = []
        while page := await directory.scan(BUCKET, "", found[-1] if found else "", 3):
            found += keys_of(page)
        assert found == AWKWARD_KEYS
        assert keys_of(await directory.pending_under(BUCKET, "", 1000)) == AWKWARD_KEYS

    async def test_scan_every_prefix_finds_exactly_its_keys(self, directory: Directory) -> None:
        for key in AWKWARD_KEYS:
            await put(directory, object_name(key), "v")
        prefixes = {key[:length] for key in AWKWARD_KEYS for length in (1, 2, 3, 300, 468, 474, len(key))}
        for prefix in prefixes:
            expected = [key for key in AWKWARD_KEYS if key.startswith(prefix)]
            assert keys_of(await directory.scan(BUCKET, prefix, "", 1000)) == expected
            assert keys_of(await directory.pending_under(BUCKET, prefix, 1000)) == expected
            after = expected[len(expected) // 2]
            rest = [key for key in expected if key.encode() > after.encode()]
            assert keys_of(await directory.scan(BUCKET, prefix, after, 1000)) == rest
            assert keys_of(await directory.scan_unpersisted(BUCKET, prefix, after, 2)) == rest[:2]

    async def test_scan_after_beyond_prefix_finds_nothing(self, directory: Directory) -> None:
        await put(directory, object_name("a/1"), "v")
        await put(directory, object_name("b/1"), "v")
        assert await directory.scan(BUCKET, "a/", "b", 10) == []
        assert keys_of(await directory.scan(BUCKET, "b/", "a", 10)) == ["b/1"]

    async def test_get_long_keys_that_differ_late_are_apart(self, directory: Directory) -> None:
        first, second = object_name("x" * 1000 + "1"), object_name("x" * 1000 + "2")
        await put(directory, first, "v1")
        await put(directory, second, "v2")
        await directory.delete(first, make_intent(base=NO_BASE))
        assert (await pending_of(directory, second)).uid == "v2"
        assert (await record_of(directory, second)).version == make_version("v2")

    async def test_scan_unpersisted_leaves_out_clean(self, directory: Directory) -> None:
        await put_clean(directory, object_name("a"), "v1", "o1")
        await put(directory, object_name("b"), "v2")
        await directory.delete(object_name("c"), make_intent())
        found = await directory.scan_unpersisted(BUCKET, "", "", 10)
        assert [(item.name.key, item.state) for item in found] == [("b", State.DIRTY), ("c", State.TOMBSTONE)]

    async def test_survey_pages_through_what_get_says_of_each_key(self, directory: Directory) -> None:
        for key in AWKWARD_KEYS[::3]:
            await put(directory, object_name(key), key[:4])
        for key in AWKWARD_KEYS[1::3]:
            await put_clean(directory, object_name(key), key[:4], "o")
        for key in AWKWARD_KEYS[2::3]:
            await directory.delete(object_name(key), make_intent())
        await put(directory, object_name("a", "bucket2"), "z")
        found: list[Seen] = []
        while page := await directory.survey(BUCKET, "", key_of(found[-1]) if found else "", 7):
            found += page
        assert [key_of(each) for each in found] == AWKWARD_KEYS
        assert found == [await directory.get(object_name(key)) for key in AWKWARD_KEYS]
        assert await directory.survey(BUCKET, "q/", "r", 7) == []
        under = [key for key in AWKWARD_KEYS if key.startswith("p/")]
        assert [key_of(each) for each in await directory.survey(BUCKET, "p/", under[2], 2)] == under[3:5]


def key_of(seen: Seen) -> str:
    """The key of a record that was seen."""
    assert seen.record is not None
    return seen.record.name.key
