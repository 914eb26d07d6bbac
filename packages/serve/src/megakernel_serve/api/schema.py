"""The request bodies. Unknown fields are ignored: client libraries send many of their own.

Types are strict: a number in quotes or ``true`` for 1 is an error that names the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

__all__ = [
    "MOST_CHOICES",
    "ChatFields",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationFields",
    "StreamOptions",
    "TokenizeRequest",
    "named_tool",
]

MOST_STOPS = 16
MOST_CHOICES = 128

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """Options that only streams have."""

    include_usage: bool | None = None


class GenerationFields(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: list[str] = Field(default_factory=list, max_length=MOST_STOPS)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @property
    def include_usage(self) -> bool:
        """True if a stream shall end with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("stream"):
            raise ValueError("is only allowed when stream is true")
        return value


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    prompt: Any = None
    """str, [str], [int] or [[int]]; read by :func:`megakernel_serve.api.prompts.read_prompts`."""
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function of a tool call in the history."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A tool call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | list):
            raise ValueError("must be a string, a list of text parts, or null")
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"a part of type {kind!r} is not supported; this model reads text")
        return value

    @model_validator(mode="after")
    def _content_where_needed(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message with the role {self.role!r} needs content")
        return self


class FunctionTool(Body):
    """The function that a tool offers."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


if TYPE_CHECKING:
    SentTool: TypeAlias = dict[str, Any]
else:  # checked, but kept as sent: some formats show the model the client's own object
    SentTool = Annotated[Tool, WrapValidator(_as_sent)]


class ChatFields(Body):
    """What decides how a conversation is rendered."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[SentTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _switches(cls, value: dict[str, Any] | None) -> Any:
        for name in ("enable_thinking", "thinking", "preserve_thinking"):
            if value and value.get(name) is not None and not isinstance(value[name], bool):
                raise ValueError(f"{name} must be true or false")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice_fits(cls, choice: Any, info: ValidationInfo) -> Any:
        names = [tool["function"]["name"] for tool in info.data.get("tools") or ()]
        if choice in (None, "none", "auto"):
            return choice
        if choice != "required" and named_tool(choice) is None:
            raise ValueError(
                'must be none, auto, required or {"type": "function", "function": {"name": NAME}}'
            )
        if not names:
            raise ValueError("needs tools")
        if choice != "required" and named_tool(choice) not in names:
            raise ValueError(f"names the unknown tool {named_tool(choice)!r}")
        return choice


def named_tool(choice: Any) -> str | None:
    """The one tool that a ``tool_choice`` asks for."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class ChatRequest(GenerationFields, ChatFields):
    """``POST /v1/chat/completions``."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    parallel_tool_calls: bool | None = None


class TokenizeRequest(ChatFields):
    """``POST /tokenize``: a prompt, or a conversation."""

    messages: list[ChatMessage] = Field(default_factory=list)
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
