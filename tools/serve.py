"""Serves a model over HTTP as OpenAI's completions: `python -m tools.serve`, then http://127.0.0.1:8000/v1/completions.

One thread runs the model on all requests at once (`engine.generate.Batch`): they join and leave while others are being written. For more
than one machine's worth of users, export the model and take vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from config.check import check_fields, check_range, nearest
from engine.cli import one_line_errors, parse


@dataclass
class ServeConfig:
    """A server of one model, on this machine alone unless --host says otherwise: it asks nobody for a key."""

    checkpoint: str | None = None
    """a run's folder, one of its steps, or a folder of runs (None: the newest run under out/); a run gives its best step"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8000
    """0 takes a free one"""
    rows: int = 32
    """texts written side by side"""
    waiting: int = 256
    """texts that may wait for a row; requests beyond are refused (429)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    kv_cache: str | None = None
    """what attention keeps, as sample.py has it"""
    quantize: Literal["int8", "int4"] | None = None
    """weights of the linear layers in 8 or 4 bits"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights and of the cache"""
    rope_scaling: str | None = None
    """for texts longer than it was trained on, as sample.py has it"""
    draft: str | None = None
    """a smaller run of the same tokenizer that guesses tokens ahead"""
    lookup: bool = False
    """guess what followed the last few tokens when they came before"""
    compile: bool = False
    """torch.compile the step of one token"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "rows", above=0)
        check_range(self, "waiting", least=0)
        check_range(self, "port", least=0, most=65535)


if __name__ == "__main__":
    config = parse(ServeConfig)

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable

import torch

from data.tokenizer import Tokenizer
from engine.checkpoint import find_step, load_model
from engine.completion import Completion, Writing, together
from engine.decode import prepare
from engine.device import pick_device
from engine.generate import Batch
from engine.speculate import guesser
from engine.worker import Refused, Worker

MOST = 10_000_000      # bytes of a request


def refusal(status: int, reason: str) -> dict:
    return {"error": {"message": reason, "type": "invalid_request_error" if status < 500 else "server_error", "code": status}}


async def read(request) -> Completion:
    """A Starlette request's body. Refused where it is none of ours."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST:
            raise Refused(413, f"a request may have {MOST:,} bytes")
    try:
        said = json.loads(body)
        if not isinstance(said, dict):
            raise ValueError("the body must be a JSON object")
        known = [f.name for f in fields(Completion)]
        for key in said:
            if key not in known:
                raise ValueError(f"{key!r} is not served{nearest(key, known)}")
        return Completion(**{key: v for key, v in said.items() if v is not None})
    except (ValueError, OverflowError, RecursionError) as e:      # json's errors are ValueErrors
        raise Refused(400, str(e) or "the body is nested too deeply") from None


def app(make: Callable[[], Batch], tokenizer: Tokenizer, name: str, waiting: int):
    """The ASGI application. make: an empty batch, now and after what went wrong."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    worker = Worker(make, waiting)

    class Stream(StreamingResponse):
        """Its rows are free again once it is over, also where the reader has gone before it began."""

        def __init__(self, writing: Writing, events: AsyncIterator[str]):
            super().__init__(events, media_type="text/event-stream")
            self.writing = writing

        async def __call__(self, *args) -> None:
            try:
                await super().__call__(*args)
            finally:
                self.writing.close()

    async def completions(request: Request) -> Response:
        try:
            asked = await read(request)
            writing = Writing(asked, worker, tokenizer, worker.batch.context)
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refused, ValueError) as e:
            status = e.status if isinstance(e, Refused) else 400
            return JSONResponse(refusal(status, str(e)), status)
        base = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": name}

        async def stream() -> AsyncIterator[str]:
            try:
                async for choice in writing.choices():
                    yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
                if (asked.stream_options or {}).get("include_usage"):
                    yield f"data: {json.dumps({**base, 'choices': [], 'usage': writing.usage()})}\n\n"
            except Refused as e:
                yield f"data: {json.dumps(refusal(e.status, str(e)))}\n\n"
            yield "data: [DONE]\n\n"

        async def gone() -> None:
            while not await request.is_disconnected():
                await asyncio.sleep(0.1)

        async def all_of_it() -> list[dict]:
            return [choice async for choice in writing.choices()]

        if asked.stream:
            return Stream(writing, stream())
        work, watch = asyncio.create_task(all_of_it()), asyncio.create_task(gone())
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, watch):
            if not task.done():
                task.cancel()
        try:
            return JSONResponse({**base, "choices": together(await work), "usage": writing.usage()})
        except asyncio.CancelledError:
            return Response(status_code=499)
        except Refused as e:
            return JSONResponse(refusal(e.status, str(e)), e.status)
        finally:
            writing.close()

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "heed"}]})

    @contextlib.asynccontextmanager
    async def life(_):
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models), Route("/health", models)]
    return Starlette(routes=routes, lifespan=life)


def main(config: ServeConfig) -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError:
        raise ValueError("the server needs two packages more: pip install starlette uvicorn") from None
    step = find_step(config.checkpoint)
    model, tokenizer = load_model(step, pick_device(config.device), config.kv_cache, config.rope_scaling)
    model = model.to(getattr(torch, config.dtype)).eval()
    prepare(model, config.quantize)
    ahead = guesser(config.draft, config.lookup, None, model, tokenizer, config.quantize, config.rope_scaling)
    make = lambda: Batch(model, config.rows, tokenizer.vocab_size, speculate=ahead, compile=config.compile)
    uvicorn.run(app(make, tokenizer, step.parent.name, config.waiting), host=config.host, port=config.port, log_level="info",
                timeout_graceful_shutdown=5)


if __name__ == "__main__":
    with one_line_errors():
        main(config)
