"""HTTP in front of an engine: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages.

settings   `ServerSettings`: names, keys, limits
worker     `EngineWorker`: the engine in a thread of its own, asked from an event loop
protocol   bodies to prompts and answers to bodies, by `deepseek-recipe`, the model makers' own library
history    earlier tool calls, however a client spells their arguments
exchange   one request's way through the engine: chunks as they come, or one answer
errors     what went wrong as the body that a route's clients expect
app        the routes
"""
