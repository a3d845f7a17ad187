"""A server with the interface of OpenAI's completions, on the engine that serves many requests.

In reading order:

- `request_fields`: what a request asks for, read from its JSON and checked.
- `chat_template`: the prompt of a conversation, by the template of the model folder.
- `answers`: the JSON of completions, their chunks and errors.
- `generation_jobs`: the outputs of one request on the engine.
- `server`: the routes, and `serve`.
"""
