//! The chat format that RWKV's World and G1 models are trained on, for checkpoints without a template of their own.

/// The strings with which a model continues to the next turn instead of ending its answer.
pub(super) const TURNS: &[&str] = &["\n\nUser:"];

/// The text by which a template shows that its conversations use this format.
pub(super) const USER: &str = "User:";

/// The format as a template; with `enable_thinking`, the variant in which G1 models reason. Two line breaks end a turn,
/// so empty lines are removed from all texts but the model's own. `separator` stands between two texts in training.
///
/// The family publishes no format for tools. A system message describes them, and calls are written in the form that
/// the tool grammars use.
pub(super) const SOURCE: &str = "{{ separator }}\
{%- if tools -%}\
{{ 'System: You can call these functions:\\n' }}\
{%- for tool in tools -%}{{ tool['function'] | tojson + '\\n' }}{%- endfor -%}\
{{ 'To call one, answer with {\"name\": its name, \"arguments\": {its arguments}} and nothing else.\\n\\n' }}\
{%- endif -%}\
{%- for message in messages -%}\
{%- if message['role'] == 'assistant' -%}\
{{ 'Assistant: ' + message['content'] | trim }}\
{%- for call in message['tool_calls'] or [] -%}\
{{ '\\n' if message['content'] or not loop.first else '' }}\
{{- {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}\
{%- endfor -%}\
{%- else -%}\
{{ 'System: ' if message['role'] == 'system' else 'User: ' }}\
{{- message['content'] | replace('\\r\\n', '\\n') | trim | split('\\n') | select | join('\\n') }}\
{%- endif -%}\
{{ '\\n\\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}\
{{ 'Assistant: <think' if enable_thinking else 'Assistant:' }}\
{{ ' ' if continue_final_message and continue_final_message[0] not in ' \\n' }}\
{%- endif -%}";
