"""CSM as transformers has it, for many sentences at once.

Every module is transformers' own. Around them stands what makes many requests run as one: noise that is a function of
a request's key, a depth decoder whose cache has the same few positions in every frame, a codec that decodes in parts.
"""
