"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megakernel_serve.api.body import read_json, validate
from megakernel_serve.api.conversation import render
from megakernel_serve.api.schema import DetokenizeRequest, TokenizeRequest
from megakernel_serve.api.service import Service
from megakernel_serve.api.unsupported import refuse_unsupported

__all__ = ["detokenize", "tokenize"]


async def tokenize(request: Request) -> Response:
    """Ids of a text, or of a conversation as the model would read it."""
    service: Service = request.app.state.service
    values = await read_json(request, service.config.max_body_bytes)
    refuse_unsupported(values)
    body = validate(values, TokenizeRequest)
    service.check_model(body.model)
    return JSONResponse(await asyncio.to_thread(_tokenize, service, body))


async def detokenize(request: Request) -> Response:
    """Text of ids, special tokens included; ids that the tokenizer does not know give nothing."""
    service: Service = request.app.state.service
    values = await read_json(request, service.config.max_body_bytes)
    body = validate(values, DetokenizeRequest)
    service.check_model(body.model)
    tokenizer = service.loaded.tokenizer
    known = [token for token in body.tokens if token < 2**32]
    text = await asyncio.to_thread(tokenizer.decode, known, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    loaded = service.loaded
    if body.prompt is not None:
        encoded = loaded.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        ids = list(encoded.ids)
    else:
        ids = list(render(service, body)[1].token_ids)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": loaded.model.info.max_context}
    if body.return_token_strs:
        answer["token_strs"] = [loaded.tokenizer.id_to_token(token) or "" for token in ids]
    return answer
