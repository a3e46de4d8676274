"""One frame of each kind, and more of those with optional fields, with their text in JSON and bytes in MessagePack."""

from shardyard.wire.messaging import (
    CaughtUp,
    Channels,
    Chat,
    Chats,
    ClientFrame,
    Deliver,
    Done,
    Elsewhere,
    Gap,
    GetChannels,
    GetChats,
    GetHistory,
    GetPosts,
    Hello,
    History,
    IsTyping,
    IsTypingIn,
    Join,
    Leave,
    Marked,
    Membership,
    Message,
    Ping,
    Pong,
    Position,
    Post,
    Posted,
    Posts,
    Presence,
    Refused,
    Send,
    Sent,
    ServerFrame,
    SetMark,
    Typing,
    TypingIn,
    Watch,
    Welcome,
)

FROM_CLIENT: list[tuple[ClientFrame, str, str]] = [
    (
        Hello("eyJ...", "phone"),
        ('{"type":"hello","token":"eyJ...","device":"phone","position":null,"last":null,"sent":null}'),
        (
            "86a474797065a568656c6c6fa5746f6b656ea665794a2e2e2ea6646576696365a570686f6e65a8706f736974696f6ec0a46c"
            "617374c0a473656e74c0"
        ),
    ),
    (
        Hello("eyJ...", "phone", Position(3, 17, 700), "2484", "2485"),
        (
            '{"type":"hello","token":"eyJ...","device":"phone","position":{"partition":3,"epoch":17,"offset":700}'
            ',"last":"2484","sent":"2485"}'
        ),
        (
            "86a474797065a568656c6c6fa5746f6b656ea665794a2e2e2ea6646576696365a570686f6e65a8706f736974696f6e83a970"
            "6172746974696f6e03a565706f636811a66f6666736574cd02bca46c617374a432343834a473656e74a432343835"
        ),
    ),
    (
        Send(7, "bob", "Grüß dich"),
        ('{"type":"send","number":7,"to":"bob","text":"Grüß dich"}'),
        ("84a474797065a473656e64a66e756d62657207a2746fa3626f62a474657874ab4772c3bcc39f2064696368"),
    ),
    (
        SetMark(8, "bob", "seen", "2484"),
        ('{"type":"mark","number":8,"to":"bob","kind":"seen","upto":"2484"}'),
        ("85a474797065a46d61726ba66e756d62657208a2746fa3626f62a46b696e64a47365656ea47570746fa432343834"),
    ),
    (
        Typing("bob"),
        ('{"type":"typing","to":"bob"}'),
        ("82a474797065a6747970696e67a2746fa3626f62"),
    ),
    (
        Watch(["bob", "carol"]),
        ('{"type":"watch","users":["bob","carol"]}'),
        ("82a474797065a57761746368a5757365727392a3626f62a56361726f6c"),
    ),
    (
        GetHistory(9, "bob"),
        ('{"type":"history","number":9,"with":"bob","before":null,"limit":50}'),
        ("85a474797065a7686973746f7279a66e756d62657209a477697468a3626f62a66265666f7265c0a56c696d697432"),
    ),
    (
        GetHistory(9, "bob", "2484", 20),
        ('{"type":"history","number":9,"with":"bob","before":"2484","limit":20}'),
        ("85a474797065a7686973746f7279a66e756d62657209a477697468a3626f62a66265666f7265a432343834a56c696d697414"),
    ),
    (
        GetChats(10),
        ('{"type":"chats","number":10,"before":null,"limit":50}'),
        ("84a474797065a56368617473a66e756d6265720aa66265666f7265c0a56c696d697432"),
    ),
    (
        GetChats(10, "2484", 20),
        ('{"type":"chats","number":10,"before":"2484","limit":20}'),
        ("84a474797065a56368617473a66e756d6265720aa66265666f7265a432343834a56c696d697414"),
    ),
    (
        Post(11, "news", "Grüß euch"),
        ('{"type":"post","number":11,"channel":"news","text":"Grüß euch"}'),
        ("84a474797065a4706f7374a66e756d6265720ba76368616e6e656ca46e657773a474657874ab4772c3bcc39f2065756368"),
    ),
    (
        Join(12, "news"),
        ('{"type":"join","number":12,"channel":"news"}'),
        ("83a474797065a46a6f696ea66e756d6265720ca76368616e6e656ca46e657773"),
    ),
    (
        Leave(13, "news"),
        ('{"type":"leave","number":13,"channel":"news"}'),
        ("83a474797065a56c65617665a66e756d6265720da76368616e6e656ca46e657773"),
    ),
    (
        TypingIn("news"),
        ('{"type":"typing-in","channel":"news"}'),
        ("82a474797065a9747970696e672d696ea76368616e6e656ca46e657773"),
    ),
    (
        GetPosts(14, "news"),
        ('{"type":"posts","number":14,"channel":"news","before":null,"limit":50}'),
        ("85a474797065a5706f737473a66e756d6265720ea76368616e6e656ca46e657773a66265666f7265c0a56c696d697432"),
    ),
    (
        GetPosts(14, "news", "2484", 20),
        ('{"type":"posts","number":14,"channel":"news","before":"2484","limit":20}'),
        ("85a474797065a5706f737473a66e756d6265720ea76368616e6e656ca46e657773a66265666f7265a432343834a56c696d697414"),
    ),
    (
        GetChannels(15),
        ('{"type":"channels","number":15,"after":null,"limit":50}'),
        ("84a474797065a86368616e6e656c73a66e756d6265720fa56166746572c0a56c696d697432"),
    ),
    (
        GetChannels(15, "news", 20),
        ('{"type":"channels","number":15,"after":"news","limit":20}'),
        ("84a474797065a86368616e6e656c73a66e756d6265720fa56166746572a46e657773a56c696d697414"),
    ),
    (
        Ping(),
        ('{"type":"ping"}'),
        ("81a474797065a470696e67"),
    ),
]
FROM_SERVER: list[tuple[ServerFrame, str, str]] = [
    (
        Welcome("alice", Position(3, 17, 700), "log", "position"),
        (
            '{"type":"welcome","user":"alice","position":{"partition":3,"epoch":17,"offset":700},"mirror":"log","'
            'resume":"position","sent":null,"server":"","ownership":0,"servers":[]}'
        ),
        (
            "89a474797065a777656c636f6d65a475736572a5616c696365a8706f736974696f6e83a9706172746974696f6e03a565706f"
            "636811a66f6666736574cd02bca66d6972726f72a36c6f67a6726573756d65a8706f736974696f6ea473656e74c0"
            "a6736572766572a0a96f776e65727368697000a77365727665727390"
        ),
    ),
    (
        Welcome("alice", Position(3, 17, 700), "local", "new", "2480", "chat-1", 52, ("ws://127.0.0.1:7501",)),
        (
            '{"type":"welcome","user":"alice","position":{"partition":3,"epoch":17,"offset":700},"mirror":"local"'
            ',"resume":"new","sent":"2480","server":"chat-1","ownership":52,"servers":["ws://127.0.0.1:7501"]}'
        ),
        (
            "89a474797065a777656c636f6d65a475736572a5616c696365a8706f736974696f6e83a9706172746974696f6e03a565706f"
            "636811a66f6666736574cd02bca66d6972726f72a56c6f63616ca6726573756d65a36e6577a473656e74a432343830"
            "a6736572766572a6636861742d31a96f776e65727368697034"
            "a77365727665727391b377733a2f2f3132372e302e302e313a37353031"
        ),
    ),
    (
        Deliver(
            5,
            17,
            [
                Message("2484", "bob", "alice", "hi", 1794911298800, 700),
                Marked("2485", "bob", "alice", "seen", "2480", 1794911298801, 701),
            ],
        ),
        (
            '{"type":"deliver","seq":5,"epoch":17,"entries":[{"type":"message","id":"2484","from":"bob","to":"ali'
            'ce","text":"hi","at":1794911298800,"offset":700},{"type":"marked","id":"2485","from":"bob","to":"ali'
            'ce","kind":"seen","upto":"2480","at":1794911298801,"offset":701}]}'
        ),
        (
            "84a474797065a764656c69766572a373657105a565706f636811a7656e74726965739287a474797065a76d657373616765a2"
            "6964a432343834a466726f6da3626f62a2746fa5616c696365a474657874a26869a26174cf000001a1e90ce4f0a66f666673"
            "6574cd02bc88a474797065a66d61726b6564a26964a432343835a466726f6da3626f62a2746fa5616c696365a46b696e64a4"
            "7365656ea47570746fa432343830a26174cf000001a1e90ce4f1a66f6666736574cd02bd"
        ),
    ),
    (
        Deliver(7, 17, [Message("2486", "alice", "bob", "hi", 1794911298802)]),
        (
            '{"type":"deliver","seq":7,"epoch":17,"entries":[{"type":"message","id":"2486","from":"alice","to":"b'
            'ob","text":"hi","at":1794911298802}]}'
        ),
        (
            "84a474797065a764656c69766572a373657107a565706f636811a7656e74726965739186a474797065a76d657373616765a2"
            "6964a432343836a466726f6da5616c696365a2746fa3626f62a474657874a26869a26174cf000001a1e90ce4f2"
        ),
    ),
    (
        Deliver(8, 17, [Posted("2487", "news", "bob", "hi", 1794911298803, 703)]),
        (
            '{"type":"deliver","seq":8,"epoch":17,"entries":[{"type":"posted","id":"2487","channel":"news","from"'
            ':"bob","text":"hi","at":1794911298803,"offset":703}]}'
        ),
        (
            "84a474797065a764656c69766572a373657108a565706f636811a7656e74726965739187a474797065a6706f73746564a269"
            "64a432343837a76368616e6e656ca46e657773a466726f6da3626f62a474657874a26869a26174cf000001a1e90ce4f3a66f"
            "6666736574cd02bf"
        ),
    ),
    (
        CaughtUp(Position(3, 17, 702)),
        ('{"type":"caught-up","position":{"partition":3,"epoch":17,"offset":702}}'),
        (
            "82a474797065a96361756768742d7570a8706f736974696f6e83a9706172746974696f6e03a565706f636811a66f66667365"
            "74cd02be"
        ),
    ),
    (
        Gap("more than 10000 entries were missed"),
        ('{"type":"gap","reason":"more than 10000 entries were missed"}'),
        (
            "82a474797065a3676170a6726561736f6ed9236d6f7265207468616e20313030303020656e74726965732077657265206d69"
            "73736564"
        ),
    ),
    (
        Sent(7, "2486", 1794911298802),
        ('{"type":"sent","number":7,"id":"2486","at":1794911298802,"duplicate":false}'),
        ("85a474797065a473656e74a66e756d62657207a26964a432343836a26174cf000001a1e90ce4f2a96475706c6963617465c2"),
    ),
    (
        Sent(7, "2486", 1794911298802, True),
        ('{"type":"sent","number":7,"id":"2486","at":1794911298802,"duplicate":true}'),
        ("85a474797065a473656e74a66e756d62657207a26964a432343836a26174cf000001a1e90ce4f2a96475706c6963617465c3"),
    ),
    (
        Refused(7, "too_large", "a text has at most 16384 bytes of UTF-8"),
        (
            '{"type":"refused","number":7,"code":"too_large","message":"a text has at most 16384 bytes of UTF-8",'
            '"retry":false}'
        ),
        (
            "85a474797065a772656675736564a66e756d62657207a4636f6465a9746f6f5f6c61726765a76d657373616765d927612074"
            "65787420686173206174206d6f7374203136333834206279746573206f66205554462d38a57265747279c2"
        ),
    ),
    (
        Refused(None, "overloaded", "later", True),
        ('{"type":"refused","number":null,"code":"overloaded","message":"later","retry":true}'),
        (
            "85a474797065a772656675736564a66e756d626572c0a4636f6465aa6f7665726c6f61646564a76d657373616765a56c6174"
            "6572a57265747279c3"
        ),
    ),
    (
        IsTyping("bob"),
        ('{"type":"typing","from":"bob"}'),
        ("82a474797065a6747970696e67a466726f6da3626f62"),
    ),
    (
        IsTypingIn("news", "bob"),
        ('{"type":"typing-in","channel":"news","from":"bob"}'),
        ("83a474797065a9747970696e672d696ea76368616e6e656ca46e657773a466726f6da3626f62"),
    ),
    (
        Done(12),
        ('{"type":"done","number":12}'),
        ("82a474797065a4646f6e65a66e756d6265720c"),
    ),
    (
        Membership("news", True),
        ('{"type":"membership","channel":"news","joined":true}'),
        ("83a474797065aa6d656d62657273686970a76368616e6e656ca46e657773a66a6f696e6564c3"),
    ),
    (
        Presence("bob", 2, 1794911298800),
        ('{"type":"presence","user":"bob","online":2,"since":1794911298800}'),
        ("84a474797065a870726573656e6365a475736572a3626f62a66f6e6c696e6502a573696e6365cf000001a1e90ce4f0"),
    ),
    (
        History(9, [Message("2484", "bob", "alice", "hi", 1794911298800)], True),
        (
            '{"type":"page","number":9,"messages":[{"type":"message","id":"2484","from":"bob","to":"alice","text"'
            ':"hi","at":1794911298800}],"more":true}'
        ),
        (
            "84a474797065a470616765a66e756d62657209a86d657373616765739186a474797065a76d657373616765a26964a4323438"
            "34a466726f6da3626f62a2746fa5616c696365a474657874a26869a26174cf000001a1e90ce4f0a46d6f7265c3"
        ),
    ),
    (
        Chats(10, [Chat("bob", Message("2484", "bob", "alice", "hi", 1794911298800), 1, None, "2480", "2479")], False),
        (
            '{"type":"chat-list","number":10,"chats":[{"with":"bob","last":{"type":"message","id":"2484","from":"'
            'bob","to":"alice","text":"hi","at":1794911298800},"unread":1,"seen":null,"peer_delivered":"2480","pe'
            'er_seen":"2479"}],"more":false}'
        ),
        (
            "84a474797065a9636861742d6c697374a66e756d6265720aa563686174739186a477697468a3626f62a46c61737486a47479"
            "7065a76d657373616765a26964a432343834a466726f6da3626f62a2746fa5616c696365a474657874a26869a26174cf0000"
            "01a1e90ce4f0a6756e7265616401a47365656ec0ae706565725f64656c697665726564a432343830a9706565725f7365656e"
            "a432343739a46d6f7265c2"
        ),
    ),
    (
        Posts(14, [Posted("2487", "news", "bob", "hi", 1794911298803)], True),
        (
            '{"type":"posts-page","number":14,"posts":[{"type":"posted","id":"2487","channel":"news","from":"bob"'
            ',"text":"hi","at":1794911298803}],"more":true}'
        ),
        (
            "84a474797065aa706f7374732d70616765a66e756d6265720ea5706f7374739186a474797065a6706f73746564a26964a432"
            "343837a76368616e6e656ca46e657773a466726f6da3626f62a474657874a26869a26174cf000001a1e90ce4f3a46d6f7265"
            "c3"
        ),
    ),
    (
        Channels(15, ["chat", "news"], False),
        ('{"type":"channel-list","number":15,"channels":["chat","news"],"more":false}'),
        ("84a474797065ac6368616e6e656c2d6c697374a66e756d6265720fa86368616e6e656c7392a463686174a46e657773a46d6f7265c2"),
    ),
    (
        Elsewhere("ws://127.0.0.1:7501/v1/messaging", 0.25),
        ('{"type":"elsewhere","address":"ws://127.0.0.1:7501/v1/messaging","after":0.25}'),
        (
            "83a474797065a9656c73657768657265a761646472657373d92077733a2f2f3132372e302e302e313a373530312f76312f6d"
            "6573736167696e67a56166746572cb3fd0000000000000"
        ),
    ),
    (
        Elsewhere(None, 1.0),
        ('{"type":"elsewhere","address":null,"after":1.0}'),
        ("83a474797065a9656c73657768657265a761646472657373c0a56166746572cb3ff0000000000000"),
    ),
    (
        Pong(Position(3, 17, 702)),
        ('{"type":"pong","position":{"partition":3,"epoch":17,"offset":702}}'),
        ("82a474797065a4706f6e67a8706f736974696f6e83a9706172746974696f6e03a565706f636811a66f6666736574cd02be"),
    ),
    (
        Pong(None, ("ws://127.0.0.1:7501",)),
        ('{"type":"pong","position":null,"servers":["ws://127.0.0.1:7501"]}'),
        ("83a474797065a4706f6e67a8706f736974696f6ec0a77365727665727391b377733a2f2f3132372e302e302e313a37353031"),
    ),
]
"""Each frame, its JSON, and its MessagePack in hexadecimal."""
