"""HTTP in front of an engine: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages.

settings         `ServerSettings`: names, keys, limits
worker           `EngineWorker`: the engine in a thread of its own, asked from an event loop
fields           which fields of a body mean something, and readers of single ones
protocol         conversation bodies to prompts and answers to bodies, by `deepseek-recipe`, the model makers' library
history          earlier tool calls, however a client spells their arguments
tool_use         what a body says of tool calls, and what its answer has to match because of that
tool_grammar     calls of given tools as a grammar
tool_calls       calls reach a client whole, or not at all
reply            one completion's tokens on their way to chunks
exchange         one conversation's way through the engine: chunks as they come, or one answer
completion_body  what a text completion asks for
completion_text  its text and log-probabilities, piece by piece
completions      its way through the engine
texts            tokens of texts and conversations, and back
metrics, live    what a scraper and a page see of the engine
errors           what went wrong as the body that a route's clients expect
access           who may ask, how much at once, and what is read
answering        a handler's work to its client, within a time, undone when the client leaves
document         what the OpenAPI document says of bodies and answers
app              the routes
page             the files of the page at /
serving          a socket, and an orderly end
"""
