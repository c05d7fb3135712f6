class VLLMClientError(Exception):
    """What is the request's fault."""
