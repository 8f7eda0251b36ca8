//! The chat form that RWKV's World and G1 models are trained with, for checkpoints without a template of their own.

/// The strings with which a model goes on to the next turn instead of ending its answer.
pub(super) const TURNS: &[&str] = &["\n\nUser:"];

/// What a template writes if its conversations have this form.
pub(super) const USER: &str = "User:";

/// The form as a template, with `enable_thinking` the one in which G1 models reason. Two line breaks end a turn, so the
/// texts that are not the model's own have no empty lines. `separator` comes between two texts in training.
///
/// The family publishes no form for tools: they are described by the system, and calls are written as grammars of tools have
/// them.
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
{%- endif -%}";
