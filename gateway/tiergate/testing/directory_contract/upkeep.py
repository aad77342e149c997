"""Buckets, holders of bodies, counts."""

from tiergate.directory.base import Directory
from tiergate.model import (
    Agreement,
    Bucket,
    PinnedPrefix,
    QuarantinedSet,
    Role,
)
from tiergate.testing.directory_contract.values import (
    BUCKET,
    MARKER,
    make_intent,
    make_upload,
    object_name,
    put,
    put_clean,
)


class Upkeep:
    """Buckets, holders of bodies, counts."""

    async def test_buckets_are_kept_and_forgotten(self, directory: Directory) -> None:
        bucket = Bucket(BUCKET, "eu-west-1", True, 12.0)
        assert await directory.get_bucket(BUCKET) is None
        await directory.put_bucket(bucket)
        assert await directory.get_bucket(BUCKET) == bucket
        other = Bucket("another", "us-east-1", False, 13.0)
        await directory.put_bucket(other)
        assert await directory.buckets() == [other, bucket]
        await directory.forget_bucket("another")
        assert await directory.buckets() == [bucket]
        await directory.forget_bucket(BUCKET)
        assert await directory.get_bucket(BUCKET) is None

    async def test_pinned_prefixes_are_kept_until_unpinned(self, directory: Directory) -> None:
        later, first = PinnedPrefix(BUCKET, "run/2/", 9.0), PinnedPrefix(BUCKET, "run/1/" + "x" * 900, 5.0)
        whole = PinnedPrefix("other", "", 20.0)
        for each in (later, first, whole, PinnedPrefix(BUCKET, "run/2/", 30.0)):
            await directory.pin_prefix(each)
        assert await directory.pinned_prefixes() == [first, later, whole]
        assert not await directory.unpin_prefix(BUCKET, "run/")
        assert await directory.unpin_prefix(BUCKET, "run/2/")
        assert not await directory.unpin_prefix(BUCKET, "run/2/")
        assert await directory.pinned_prefixes() == [first, whole]

    async def test_quarantined_sets_are_kept_until_released(self, directory: Directory) -> None:
        later, first = (
            QuarantinedSet(BUCKET, "run/2/", "f2", "a shard is gone", 9.0),
            QuarantinedSet(BUCKET, "run/1/" + "x" * 900, "f1", "a head is broken", 12.0),
        )
        for each in (later, first, QuarantinedSet("other", "run/2/", "f3", "torn", 1.0)):
            await directory.quarantine_set(each)
        assert await directory.quarantined_sets(BUCKET) == [first, later]
        anew = QuarantinedSet(BUCKET, "run/2/", "f4", "another shard is gone", 20.0)
        await directory.quarantine_set(anew)
        assert not await directory.release_set(later)
        assert await directory.quarantined_sets(BUCKET) == [first, anew]
        assert await directory.release_set(anew)
        assert not await directory.release_set(anew)
        assert await directory.quarantined_sets(BUCKET) == [first]
        assert await directory.quarantined_sets("nowhere") == []

    async def test_first_agreement_stands_until_it_is_forgotten(self, directory: Directory) -> None:
        assert await directory.agreed(BUCKET, "run/", "job/0") is None
        first = Agreement(BUCKET, "run/", "job/0", "step 7", 10.0)
        assert await directory.agree(first) == first
        assert await directory.agree(Agreement(BUCKET, "run/", "job/0", "step 8", 11.0)) == first
        for name, prefix in (("job/1", "run/"), ("job/0", "run/below/"), ("job/" + "y" * 900, "run/")):
            other = Agreement(BUCKET, prefix, name, "step 8", 20.0)
            assert await directory.agree(other) == other
            assert await directory.agreed(BUCKET, prefix, name) == other
        assert await directory.agreed(BUCKET, "run/", "job/0") == first
        assert await directory.expire_finished(15.0) == 1
        assert await directory.agreed(BUCKET, "run/", "job/0") is None
        assert await directory.agreed(BUCKET, "run/", "job/1") is not None

    async def test_live_holders_are_versions_and_uploads(self, directory: Directory) -> None:
        await put_clean(directory, object_name("clean"), "v1", "o1")
        await put(directory, object_name("dirty"), "v2")
        await put(directory, object_name("dirty"), "v3")
        await directory.delete(object_name("gone"), make_intent())
        await directory.create_upload(make_upload("up1"))
        await put_clean(directory, MARKER, "m1", "o1", Role.MARKER)
        await directory.withdraw(MARKER, "m1", 1.0)
        assert await directory.live_holders() == {"v1", "v3", "up1", "m1"}

    async def test_counts_follow_every_change(self, directory: Directory) -> None:
        await put_clean(directory, object_name("clean"), "v1", "o1")
        await put(directory, object_name("dirty"), "v2", size_bytes=100)
        await put(directory, object_name("dirty"), "v3", size_bytes=40)
        await directory.delete(object_name("gone"), make_intent())
        await directory.create_upload(make_upload("up1"))
        counts = await directory.counts()
        expected = {"clean": 1, "dirty": 1, "tombstone": 1, "pending": 2, "pending_bytes": 40, "uploads": 1}
        assert {name: counts[name] for name in expected} == expected
