"""A server with the interface of OpenAI's completions, on the engine that serves many requests.

In reading order:

- `request_fields`: what a request asks for, read from its JSON and checked; the prompt of a conversation,
  by the chat template of the model folder, which `chat_template_worker` renders in a process of its own.
- `completions`: the outputs of one request on the engine, and the JSON of completions, their chunks and errors.
- `server`: the routes, and `serve`.
"""
