"""Which parts of which operations the gateway carries out itself. Whatever else a request holds is the origin's to do:
the whole request is forwarded then, so that nothing is silently dropped (promise P1). Pure data."""

from typing import Any

READ = frozenset(
    {
        "Bucket",
        "Key",
        "IfMatch",
        "IfNoneMatch",
        "IfModifiedSince",
        "IfUnmodifiedSince",
        "Range",
        "PartNumber",
        "ChecksumMode",
        "ResponseCacheControl",
        "ResponseContentDisposition",
        "ResponseContentEncoding",
        "ResponseContentLanguage",
        "ResponseContentType",
        "ResponseExpires",
    }
)

CHECKSUMS = frozenset(
    {
        "ContentMD5",
        "ChecksumAlgorithm",
        "ChecksumCRC32",
        "ChecksumCRC32C",
        "ChecksumCRC64NVME",
        "ChecksumSHA1",
        "ChecksumSHA256",
        "ChecksumSHA512",
        "ChecksumMD5",
        "ChecksumXXHASH64",
        "ChecksumXXHASH3",
        "ChecksumXXHASH128",
    }
)

DESCRIPTION = frozenset(
    {
        "Bucket",
        "Key",
        "CacheControl",
        "ContentDisposition",
        "ContentEncoding",
        "ContentLanguage",
        "ContentType",
        "Expires",
        "Metadata",
        "StorageClass",
        "Tagging",
        "WebsiteRedirectLocation",
        "ServerSideEncryption",
        "SSEKMSKeyId",
        "BucketKeyEnabled",
    }
)

COPY_SOURCE = frozenset(
    {
        "CopySource",
        "CopySourceIfMatch",
        "CopySourceIfNoneMatch",
        "CopySourceIfModifiedSince",
        "CopySourceIfUnmodifiedSince",
    }
)

LISTING = frozenset({"Bucket", "Prefix", "Delimiter", "EncodingType", "MaxKeys"})

OWNED_MEMBERS: dict[str, frozenset[str]] = {
    "GetObject": READ,
    "HeadObject": READ,
    "PutObject": DESCRIPTION | CHECKSUMS | {"Body", "ContentLength", "IfMatch", "IfNoneMatch"},
    "CopyObject": DESCRIPTION
    | COPY_SOURCE
    | {"MetadataDirective", "TaggingDirective", "ChecksumAlgorithm", "IfMatch", "IfNoneMatch"},
    "DeleteObject": frozenset({"Bucket", "Key", "IfMatch"}),
    "DeleteObjects": frozenset({"Bucket", "Delete", "ChecksumAlgorithm"}),
    "CreateMultipartUpload": DESCRIPTION | {"ChecksumAlgorithm", "ChecksumType"},
    "UploadPart": CHECKSUMS | {"Bucket", "Key", "Body", "ContentLength", "PartNumber", "UploadId"},
    "UploadPartCopy": COPY_SOURCE | {"Bucket", "Key", "PartNumber", "UploadId", "CopySourceRange"},
    "CompleteMultipartUpload": CHECKSUMS
    | {
        "Bucket",
        "Key",
        "MultipartUpload",
        "UploadId",
        "ChecksumType",
        "MpuObjectSize",
        "IfMatch",
        "IfNoneMatch",
    },
    "AbortMultipartUpload": frozenset({"Bucket", "Key", "UploadId"}),
    "ListParts": frozenset({"Bucket", "Key", "UploadId", "MaxParts", "PartNumberMarker"}),
    "ListMultipartUploads": frozenset(
        {
            "Bucket",
            "Delimiter",
            "EncodingType",
            "KeyMarker",
            "MaxUploads",
            "Prefix",
            "UploadIdMarker",
        }
    ),
    "ListObjects": LISTING | {"Marker"},
    "ListObjectsV2": LISTING | {"ContinuationToken", "FetchOwner", "StartAfter"},
    "HeadBucket": frozenset({"Bucket"}),
    "GetBucketLocation": frozenset({"Bucket"}),
}

MAKES_VISIBLE = frozenset({"PutObject", "CopyObject", "CompleteMultipartUpload", "RenameObject", "RestoreObject"})
"""Operations that make an object appear or change in the origin: forwarded, they wait for the fence."""


def is_owned(operation: str, params: dict[str, Any]) -> bool:
    """Whether the gateway carries out everything that the request asks for."""
    return params.keys() <= OWNED_MEMBERS[operation]
