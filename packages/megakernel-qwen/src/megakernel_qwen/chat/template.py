"""The fixed texts of the Qwen3.8 chat template: constants of the format, byte for byte."""

__all__ = [
    "EFFORT_LINES",
    "TOOLS_FOOTER",
    "TOOLS_HEADER",
    "TOOL_INSTRUCTIONS",
]

EFFORT_LINES = {
    "low": (
        "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to"
        " the conclusion without unnecessary elaboration."
    ),
    "medium": "",
    "xhigh": (
        "Reasoning effort is set to xhigh. Please think carefully through the task, validate key"
        " assumptions, consider plausible alternatives, and prioritize correctness, consistency,"
        " and clarity in the final answer."
    ),
}
"""First line of the system turn by effort; medium has none."""

TOOLS_HEADER = "# Tools\n\nYou have access to the following functions:\n\n<tools>"

TOOLS_FOOTER = "\n</tools>"

TOOL_INSTRUCTIONS = """\
If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be\
 nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function\
 call, but NOT after
- If there is no function call available, answer the question like normal with your current\
 knowledge and do not tell the user about function calls
</IMPORTANT>"""
