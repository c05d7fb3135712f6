"""Every error that polymux raises on purpose.

Each class carries the HTTP status it turns into, so that the server, the Python API and the CLI agree. An error that
crosses from a stage process to the API process travels as an `ErrorInfo` and is rebuilt by `from_info`.

PolymuxError                      500
 ├─ ConfigError                   exit code 2   a flag, a combination of flags, or a value is impossible
 ├─ CheckpointError               exit code 1   the checkpoint is missing, incomplete or inconsistent
 ├─ CacheError                    exit code 1   a cache of files on disk cannot be used, read or written
 ├─ PinnedMemoryError             500           host memory can be neither used nor given back: the process must end
 ├─ InvalidRequestError           400           one field of a request is wrong (names field, value, what is allowed)
 │   ├─ ModelNotFoundError        404
 │   ├─ VideoNotFoundError        404           there is no such job, or no more
 │   ├─ VoiceNotFoundError        404           no voice of this name was uploaded
 │   ├─ VideoNotReadyError        404           the job has made no file, or not yet
 │   ├─ RangeNotSatisfiableError  416           the file is shorter than that
 │   └─ MediaTypeError            415           the body is of a type or encoding that is not read here
 ├─ BadHttpError                  400           what came over the connection is not valid HTTP
 ├─ AuthenticationError           401           no API key, or a wrong one
 ├─ ForbiddenOriginError          403           a browser's page from elsewhere asks, and nobody allowed it
 ├─ ReceiveTimeoutError           408           the request did not arrive in time
 ├─ PayloadTooLargeError          413
 ├─ QueueFullError                429           with Retry-After
 ├─ HeadersTooLargeError          431
 ├─ RequestAbortedError           499           the client left, or somebody called abort()
 ├─ NotReadyError                 503           still loading, draining, or the stage is gone
 │   └─ StageDeadError            503           the stage process died while it held the request
 ├─ OverloadedError               503           too many connections, or too much in their bodies; with Retry-After
 ├─ DeadlineExceededError         504           the request's own time was over before it was done
 ├─ StorageError                  500           a file could not be written
 │   └─ StorageFullError          507           no room for what is to be kept
 └─ GenerationError               500           the request failed inside the model
     ├─ OutOfMemoryError          500           this request alone does not fit
     ├─ NonFiniteOutputError      500           the model produced NaN or infinity
     └─ UnusableOutputError       500           what the model wrote is no output: another seed may help
"""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True):
    """The wire form of an error."""

    kind: str
    message: str
    param: str | None = None


class PolymuxError(Exception):
    """Base class. `message` is one clear line; `param` names the field at fault, if it is one field; `retry_after_s`
    says when the same may work, where that is known."""

    status = 500
    code = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        self.message = _encodable(message)
        self.param = _encodable(param) if param is not None else None
        super().__init__(self.message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's `error.type`."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def info(self) -> ErrorInfo:
        return ErrorInfo(type(self).__name__, self.message, self.param)


class ConfigError(PolymuxError):
    code = "invalid_config"


class CheckpointError(PolymuxError):
    code = "invalid_checkpoint"


class CacheError(PolymuxError):
    code = "cache_unusable"


class PinnedMemoryError(PolymuxError):
    code = "pinned_memory_lost"


class InvalidRequestError(PolymuxError):
    status = 400
    code = "invalid_value"


class ModelNotFoundError(InvalidRequestError):
    status = 404
    code = "model_not_found"


class VideoNotFoundError(InvalidRequestError):
    status = 404
    code = "video_not_found"


class VoiceNotFoundError(InvalidRequestError):
    status = 404
    code = "voice_not_found"


class VideoNotReadyError(InvalidRequestError):
    status = 404
    code = "video_not_ready"


class RangeNotSatisfiableError(InvalidRequestError):
    status = 416
    code = "range_not_satisfiable"


class MediaTypeError(InvalidRequestError):
    status = 415
    code = "unsupported_media_type"


class BadHttpError(PolymuxError):
    status = 400
    code = "invalid_http"


class AuthenticationError(PolymuxError):
    status = 401
    code = "invalid_api_key"


class ForbiddenOriginError(PolymuxError):
    status = 403
    code = "forbidden_origin"


class ReceiveTimeoutError(PolymuxError):
    status = 408
    code = "receive_timeout"


class PayloadTooLargeError(PolymuxError):
    status = 413
    code = "payload_too_large"


class QueueFullError(PolymuxError):
    status = 429
    code = "queue_full"
    retry_after_s = 1


class HeadersTooLargeError(PolymuxError):
    status = 431
    code = "headers_too_large"


class RequestAbortedError(PolymuxError):
    status = 499
    code = "request_aborted"


class NotReadyError(PolymuxError):
    status = 503
    code = "not_ready"


class StageDeadError(NotReadyError):
    code = "stage_dead"


class OverloadedError(PolymuxError):
    status = 503
    code = "server_overloaded"
    retry_after_s = 1


class DeadlineExceededError(PolymuxError):
    status = 504
    code = "deadline_exceeded"


class StorageError(PolymuxError):
    code = "storage_failed"


class StorageFullError(StorageError):
    status = 507
    code = "storage_full"


class GenerationError(PolymuxError):
    code = "generation_failed"


class OutOfMemoryError(GenerationError):
    code = "out_of_memory"


class NonFiniteOutputError(GenerationError):
    code = "non_finite_output"


class UnusableOutputError(GenerationError):
    code = "unusable_output"


def _encodable(text: str) -> str:
    """Lone surrogates escaped: a text that quotes them could neither be sent nor logged."""
    return text.encode(errors="backslashreplace").decode()


def _tree(cls: type[PolymuxError]) -> list[type[PolymuxError]]:
    return [cls, *(c for sub in cls.__subclasses__() for c in _tree(sub))]


def info_of(error: Exception) -> ErrorInfo:
    """The wire form of any exception, where it must go on as an error of ours."""
    if isinstance(error, PolymuxError):
        return error.info()
    return GenerationError(f"{type(error).__name__}: {error}").info()


def from_info(info: ErrorInfo) -> PolymuxError:
    """Rebuild an error from its wire form; an unknown kind becomes a `GenerationError`."""
    kinds = {cls.__name__: cls for cls in _tree(PolymuxError)}
    return kinds.get(info.kind, GenerationError)(info.message, param=info.param)
