"""S3's error codes: the HTTP status and the message that go with each.

https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from collections.abc import Mapping

UNKNOWN_CODE_STATUS = 400

ERROR_CODES: Mapping[str, tuple[int, str]] = {
    # 3xx
    "NotModified": (304, "Not Modified"),
    "PermanentRedirect": (
        301,
        "The bucket you are attempting to access must be addressed using the specified "
        "endpoint. Please send all "
        "future requests to this endpoint.",
    ),
    "Redirect": (307, "Temporary redirect"),
    "TemporaryRedirect": (307, "You are being redirected to the bucket while DNS updates."),
    # 400
    "AmbiguousGrantByEmailAddress": (
        400,
        "The email address you provided is associated with more than one account.",
    ),
    "AuthorizationHeaderMalformed": (400, "The authorization header you provided is invalid."),
    "AuthorizationQueryParametersError": (
        400,
        "The authorization query parameters you provided are invalid.",
    ),
    "BadDigest": (
        400,
        "The Content-MD5 or checksum value that you specified did not match what the server received.",
    ),
    "BadRequest": (400, "Bad Request"),
    "BucketHasAccessPointsAttached": (
        400,
        "The bucket you are trying to delete has access points attached to it.",
    ),
    "ConnectionClosedByRequester": (400, "The connection was closed by the requester."),
    "CredentialsNotSupported": (400, "This request does not support credentials."),
    "DeviceNotActiveError": (400, "The device is not currently active."),
    "EndpointNotFound": (400, "Direct requests to the correct endpoint."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size"),
    "ExpiredToken": (400, "The provided token has expired."),
    "IllegalLocationConstraintException": (
        400,
        "The location constraint is incompatible for the region specific endpoint this request was sent to.",
    ),
    "IllegalVersioningConfigurationException": (
        400,
        "The versioning configuration specified in the request is invalid.",
    ),
    "IncompleteBody": (
        400,
        "You did not provide the number of bytes specified by the Content-Length HTTP header",
    ),
    "IncorrectEndpoint": (
        400,
        "The specified bucket exists in another Region. Direct requests to the correct endpoint.",
    ),
    "IncorrectNumberOfFilesInPostRequest": (400, "POST requires exactly one file upload per request."),
    "InlineDataTooLarge": (400, "The inline data exceeds the maximum allowed size."),
    "InvalidAccessPoint": (400, "The specified access point name or account is not valid."),
    "InvalidAccessPointAliasError": (400, "The specified access point alias name is not valid."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketAclWithObjectOwnership": (
        400,
        "Bucket cannot have ACLs set with ObjectOwnership's BucketOwnerEnforced setting",
    ),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidBucketOwnerAWSAccountID": (
        400,
        "The value of the expected bucket owner parameter must be an AWS account ID.",
    ),
    "InvalidDigest": (400, "The Content-MD5 or checksum value that you specified is not valid."),
    "InvalidEncryptionAlgorithmError": (400, "The encryption request that you specified is not valid."),
    "InvalidHostHeader": (
        400,
        "The host headers provided in the request used the incorrect style addressing.",
    ),
    "InvalidHttpMethod": (400, "The request was made using an unexpected HTTP method."),
    "InvalidGrant": (400, "The body is not one that the grant allows."),
    "InvalidLocationConstraint": (400, "The specified location-constraint is not valid"),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found.  The part may not have been uploaded, or the "
        "specified entity tag may not match the part's entity tag.",
    ),
    "InvalidPartOrder": (
        400,
        "The list of parts was not in ascending order. Parts must be ordered by part number.",
    ),
    "InvalidPolicyDocument": (
        400,
        "The content of the form does not meet the conditions specified in the policy document.",
    ),
    "InvalidRedirectLocation": (
        400,
        "The website redirect location must have a prefix of 'http://' or 'https://' or '/'.",
    ),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidSOAPRequest": (400, "The SOAP request body is invalid."),
    "InvalidSessionException": (400, "The specified session is not valid."),
    "InvalidSignature": (
        400,
        "The request signature that the server calculated does not match the provided one.",
    ),
    "InvalidStorageClass": (400, "The storage class you specified is not valid"),
    "InvalidTag": (400, "The tag provided was not a valid tag."),
    "InvalidTargetBucketForLogging": (
        400,
        "The target bucket for logging does not exist or is not owned by you.",
    ),
    "InvalidToken": (400, "The provided token is malformed or otherwise not valid."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long"),
    "KMS.DisabledException": (400, "The request was rejected because the specified KMS key is not enabled."),
    "KMS.InvalidKeyUsageException": (400, "The KMS key cannot be used in this way."),
    "KMS.KMSInvalidStateException": (
        400,
        "The state of the specified KMS key is not valid for this request.",
    ),
    "KMS.NotFoundException": (400, "The specified KMS key could not be found."),
    "MalformedACLError": (
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    "MalformedPOSTRequest": (400, "The body of your POST request is not well-formed multipart/form-data."),
    "MalformedPolicy": (400, "Your policy contains a principal that is not valid."),
    "MalformedTrailerError": (
        400,
        "The request contained trailing data that was not well-formed or did not conform to our published schema.",
    ),
    "MalformedXML": (
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    "MaxMessageLengthExceeded": (400, "Your request was too big."),
    "MaxPostPreDataLengthExceededError": (
        400,
        "Your POST request fields preceding the upload file were too large.",
    ),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size"),
    "MissingAttachment": (400, "A SOAP attachment was expected, but none was found."),
    "MissingRequestBodyError": (400, "Request Body is empty"),
    "MissingSecurityElement": (400, "The SOAP 1.1 request is missing a security element."),
    "NoLoggingStatusForKey": (400, "There is no such thing as a logging status subresource for a key."),
    "OperationNotSupported": (400, "The specified operation is not supported."),
    "RequestHeaderSectionTooLarge": (400, "Your request header section exceeds the maximum allowed size."),
    "RequestIsNotMultiPartContent": (400, "Bucket POST must be of the enclosure-type multipart/form-data."),
    "RequestTimeout": (
        400,
        "Your socket connection to the server was not read from or written to within the timeout period.",
    ),
    "RequestTorrentOfBucketError": (400, "Requesting the torrent file of a bucket is not permitted."),
    "ResponseInterrupted": (400, "Returning the response was interrupted."),
    "TokenCodeInvalidError": (400, "The serial number and/or token code you provided is not valid."),
    "TokenRefreshRequired": (400, "The provided token must be refreshed."),
    "TooManyBuckets": (400, "You have attempted to create more buckets than allowed"),
    "UnexpectedContent": (400, "This request does not support content."),
    "UnexpectedIPError": (400, "This request was rejected because the IP was unexpected."),
    "UnresolvableGrantByEmailAddress": (
        400,
        "The email address you provided does not match any account on record.",
    ),
    "UnsupportedArgument": (400, "The request contained an unsupported argument."),
    "UnsupportedSignature": (400, "The provided request is signed with an unsupported signature version."),
    "UserKeyMustBeSpecified": (400, "The bucket POST must contain the specified field name."),
    "XAmzContentChecksumMismatch": (400, "The provided checksum does not match what was computed."),
    "XAmzContentSHA256Mismatch": (
        400,
        "The provided 'x-amz-content-sha256' header does not match what was computed.",
    ),
    # 401, 403
    "UnauthorizedAccess": (401, "You do not have permission to access this resource."),
    "UnauthorizedAccessError": (403, "You do not have permission to access this resource."),
    "AccessControlListNotSupported": (400, "The bucket does not allow ACLs"),
    "AccessDenied": (403, "Access Denied"),
    "AccessPointNotOwnedByYou": (403, "You are not the owner of this access point."),
    "AccountProblem": (
        403,
        "There is a problem with your account that prevents the operation from completing.",
    ),
    "AllAccessDisabled": (403, "All access to this object has been disabled"),
    "CrossLocationLoggingProhibited": (403, "Cross-location logging is not allowed."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "InvalidLease": (403, "The lease is not that of a living process on this node's machine."),
    "InvalidObjectState": (403, "The operation is not valid for the object's storage class"),
    "InvalidPayer": (403, "All access to this object has been disabled."),
    "InvalidSecurity": (403, "The provided security credentials are not valid."),
    "NotSignedUp": (403, "Your account is not signed up for the Amazon S3 service."),
    "RequestExpired": (403, "Request has expired"),
    "RequestTimeTooSkewed": (
        403,
        "The difference between the request time and the current time is too large.",
    ),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. Check your key and "
        "signing method.",
    ),
    # 404
    "NoSuchAccessPoint": (404, "The specified access point does not exist."),
    "NoSuchAsyncRequest": (404, "The specified request was not found."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchBucketPolicy": (404, "The bucket policy does not exist"),
    "NoSuchCORSConfiguration": (404, "The CORS configuration does not exist"),
    "NoSuchGrant": (404, "There is no such grant."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchLifecycleConfiguration": (404, "The lifecycle configuration does not exist"),
    "NoSuchMultiRegionAccessPoint": (404, "The specified Multi-Region Access Point does not exist."),
    "NoSuchObjectLockConfiguration": (404, "The specified object does not have an ObjectLock configuration."),
    "NoSuchTagSet": (404, "The TagSet does not exist"),
    "NoSuchUpload": (
        404,
        "The specified upload does not exist. The upload ID may be invalid, or the "
        "upload may have been aborted "
        "or completed.",
    ),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NoSuchWebsiteConfiguration": (404, "The specified bucket does not have a website configuration"),
    "NotDeviceOwnerError": (404, "The device is not owned by you."),
    "NotFound": (404, "Not Found"),
    "ObjectLockConfigurationNotFoundError": (404, "Object Lock configuration does not exist for this bucket"),
    "OwnershipControlsNotFoundError": (404, "The bucket ownership controls were not found"),
    "ReplicationConfigurationNotFoundError": (404, "The replication configuration was not found"),
    "ServerSideEncryptionConfigurationNotFoundError": (
        404,
        "The server side encryption configuration was not found",
    ),
    # 405 to 416
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "BucketAlreadyExists": (
        409,
        "The requested bucket name is not available. The bucket namespace is shared by "
        "all users of the system. "
        "Please select a different name and try again.",
    ),
    "BucketAlreadyOwnedByYou": (
        409,
        "Your previous request to create the named bucket succeeded and you already own it.",
    ),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty"),
    "ClientTokenConflict": (409, "Your token conflicts with that of another request."),
    "ConditionalRequestConflict": (
        409,
        "The conditional request cannot succeed due to a conflicting operation against this resource.",
    ),
    "InvalidBucketState": (409, "The request is not valid for the current state of the bucket."),
    "OperationAborted": (
        409,
        "A conflicting conditional operation is currently in progress against this resource. Please try again.",
    ),
    "ObjectAlreadyInActiveTierError": (403, "This object is already in the active tier."),
    "RestoreAlreadyInProgress": (409, "Object restore is already in progress"),
    "IdempotencyException": (409, "The request conflicts with an earlier one of the same token."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "UnsupportedMediaType": (415, "The media type of the request is not supported."),
    "InvalidPartNumber": (416, "The requested partnumber is not satisfiable"),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    # Not in S3's table: RFC 9110, section 15.5.18.
    # 5xx
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "NotImplemented": (501, "A header you provided implies functionality that is not implemented"),
    "Busy": (503, "The service is unavailable. Try again later."),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SlowDown": (503, "Please reduce your request rate."),
}
