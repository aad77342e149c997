"""A folder and a place in S3 that hold the same, for training code that only knows a folder.

What SageMaker does with `checkpoint_s3_uri` and `checkpoint_local_path`
(https://docs.aws.amazon.com/sagemaker/latest/dg/model-checkpoints.html), for any cluster: `tiergate sync`, or
`agent.FolderSync` within a program.
"""
