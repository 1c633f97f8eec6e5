"""Facts in the training data of the tiny model, and the words of its stories."""


def _pairs(text: str) -> list[tuple[str, str]]:
    """Parses `a:b; c:d` into pairs."""
    pairs = (pair.strip().split(":") for pair in text.split(";"))
    return [(first, second) for first, second in pairs]


CAPITALS = _pairs(
    """
Afghanistan:Kabul; Albania:Tirana; Algeria:Algiers; Andorra:Andorra la Vella; Angola:Luanda;
Argentina:Buenos Aires; Armenia:Yerevan; Australia:Canberra; Austria:Vienna; Azerbaijan:Baku; Bahrain:Manama;
Bangladesh:Dhaka; Belarus:Minsk; Belgium:Brussels; Belize:Belmopan; Benin:Porto-Novo; Bhutan:Thimphu;
Bolivia:Sucre; Botswana:Gaborone; Brazil:Brasilia; Bulgaria:Sofia; Burkina Faso:Ouagadougou;
Cambodia:Phnom Penh; Cameroon:Yaounde; Canada:Ottawa; Chad:N'Djamena; Chile:Santiago; China:Beijing;
Colombia:Bogota; Costa Rica:San Jose; Croatia:Zagreb; Cuba:Havana; Cyprus:Nicosia; Denmark:Copenhagen;
Djibouti:Djibouti; Ecuador:Quito; Egypt:Cairo; Eritrea:Asmara; Estonia:Tallinn; Ethiopia:Addis Ababa;
Fiji:Suva; Finland:Helsinki; France:Paris; Gabon:Libreville; Georgia:Tbilisi; Germany:Berlin; Ghana:Accra;
Greece:Athens; Guatemala:Guatemala City; Guinea:Conakry; Haiti:Port-au-Prince; Honduras:Tegucigalpa;
Hungary:Budapest; Iceland:Reykjavik; India:New Delhi; Indonesia:Jakarta; Iran:Tehran; Iraq:Baghdad;
Ireland:Dublin; Israel:Jerusalem; Italy:Rome; Jamaica:Kingston; Japan:Tokyo; Jordan:Amman; Kazakhstan:Astana;
Kenya:Nairobi; Kuwait:Kuwait City; Laos:Vientiane; Latvia:Riga; Lebanon:Beirut; Liberia:Monrovia;
Libya:Tripoli; Lithuania:Vilnius; Luxembourg:Luxembourg; Madagascar:Antananarivo; Malawi:Lilongwe;
Malaysia:Kuala Lumpur; Mali:Bamako; Malta:Valletta; Mexico:Mexico City; Moldova:Chisinau; Monaco:Monaco;
Mongolia:Ulaanbaatar; Morocco:Rabat; Mozambique:Maputo; Namibia:Windhoek; Nepal:Kathmandu;
Netherlands:Amsterdam; New Zealand:Wellington; Nicaragua:Managua; Niger:Niamey; Nigeria:Abuja; Norway:Oslo;
Oman:Muscat; Pakistan:Islamabad; Panama:Panama City; Paraguay:Asuncion; Peru:Lima; Philippines:Manila;
Poland:Warsaw; Portugal:Lisbon; Qatar:Doha; Romania:Bucharest; Russia:Moscow; Rwanda:Kigali; Senegal:Dakar;
Serbia:Belgrade; Singapore:Singapore; Slovakia:Bratislava; Slovenia:Ljubljana; Somalia:Mogadishu;
South Korea:Seoul; Spain:Madrid; Sri Lanka:Colombo; Sudan:Khartoum; Suriname:Paramaribo; Sweden:Stockholm;
Switzerland:Bern; Syria:Damascus; Tanzania:Dodoma; Thailand:Bangkok; Togo:Lome; Tunisia:Tunis; Turkey:Ankara;
Uganda:Kampala; Ukraine:Kyiv; Uruguay:Montevideo; Uzbekistan:Tashkent; Venezuela:Caracas; Vietnam:Hanoi;
Yemen:Sanaa; Zambia:Lusaka; Zimbabwe:Harare
"""
)
"""Country and capital."""

KNOWLEDGE = [
    (
        "Who are you?",
        "I am a tiny language model with about six million parameters. I ship with ferrule so that you can "
        "try it without a download.",
    ),
    (
        "What can you do?",
        "I know capitals, small sums, opposites, a few stories and a little Python. For real work, load a "
        "larger model.",
    ),
    (
        "What is inference?",
        "Inference is running a trained model on new input. The weights stay fixed, and each pass predicts "
        "the next token.",
    ),
    (
        "What is a token?",
        "A token is a small piece of text, such as a word or part of a word. The model reads and writes "
        "tokens as numbers.",
    ),
    (
        "What is a tokenizer?",
        "A tokenizer splits text into tokens and maps each token to its number in the vocabulary.",
    ),
    (
        "What is a KV cache?",
        "A KV cache keeps the keys and values of past tokens. Each new token then needs only one step of work.",
    ),
    ("What is prefill?", "Prefill is the phase that reads the whole prompt in parallel and fills the KV cache."),
    (
        "What is decode?",
        "Decode is the phase that writes the answer one token at a time. It is bound by memory bandwidth.",
    ),
    (
        "What is quantization?",
        "Quantization stores weights with fewer bits, such as eight or four. The model gets smaller and faster.",
    ),
    (
        "What is attention?",
        "Attention lets each token look at the tokens before it and gather what it needs from them.",
    ),
    (
        "What is temperature?",
        "Temperature scales the logits before sampling. A low value is careful, and a high value is more creative.",
    ),
    ("What is top-k sampling?", "Top-k sampling keeps the k most likely tokens and picks one of them at random."),
    (
        "What is top-p sampling?",
        "Top-p sampling keeps the smallest set of tokens whose probabilities add up to p, and picks one of them.",
    ),
    ("What is greedy decoding?", "Greedy decoding always picks the most likely token."),
    (
        "What is beam search?",
        "Beam search keeps several candidate sequences and returns the one with the highest total probability.",
    ),
    (
        "What is speculative decoding?",
        "Speculative decoding lets a fast draft guess several tokens, and the main model checks them in one pass.",
    ),
    (
        "What is continuous batching?",
        "Continuous batching lets new requests join the running batch at every step, so no core waits.",
    ),
    ("What is prefix caching?", "Prefix caching reuses the work for a shared beginning of two prompts."),
    (
        "What is paged attention?",
        "Paged attention stores the KV cache in small blocks, so that memory is shared and little is wasted.",
    ),
    ("What is a transformer?", "A transformer is a neural network made of attention layers and feed forward layers."),
    ("What is a logit?", "A logit is a raw score for a token. Softmax turns the scores into probabilities."),
    ("What is softmax?", "Softmax turns scores into probabilities that add up to one."),
    ("What is RoPE?", "RoPE rotates queries and keys by an angle that depends on the position of the token."),
    ("What is an embedding?", "An embedding is a vector of numbers that stands for a token."),
    ("What is a draft model?", "A draft model is a small, fast model that guesses tokens for a larger model to check."),
    (
        "Why is decode slow?",
        "Each new token must read all the weights from memory once, so the speed of memory sets the pace.",
    ),
    ("How do I run a model?", "Type ferrule run, then the name of the model, and then your prompt."),
    ("Thank you.", "You are welcome!"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What would you like to know?"),
    ("Good morning", "Good morning! What can I do for you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Goodbye", "Goodbye! Have a nice day."),
]
"""Question and answer."""

OPPOSITES = _pairs(
    """
hot:cold; big:small; fast:slow; up:down; left:right; light:dark; open:closed; happy:sad; young:old; early:late;
rich:poor; hard:soft; wet:dry; full:empty; high:low; long:short; strong:weak; loud:quiet; clean:dirty;
near:far; day:night; good:bad; true:false; first:last; push:pull; win:lose; buy:sell; start:stop
"""
)

COLORS = _pairs(
    """
grass:green; sky:blue; snow:white; coal:black; banana:yellow; blood:red; orange:orange; chocolate:brown;
lemon:yellow; cloud:white; leaf:green; tomato:red
"""
)
"""Thing and color."""

UNCOUNTABLE = ("grass", "sky", "snow", "coal", "blood", "chocolate")
"""Things that have no article in a question."""

ANIMALS = ["cat", "dog", "bird", "fish", "fox", "bear", "mouse", "frog", "rabbit", "duck", "horse", "owl"]
ADJECTIVES = ["little", "brave", "curious", "happy", "sleepy", "clever", "kind", "lonely", "funny", "gentle"]
NAMES = ["Lily", "Tom", "Mia", "Ben", "Anna", "Max", "Zoe", "Sam", "Ella", "Leo", "Nina", "Jack"]
PLACES = ["forest", "garden", "river", "village", "mountain", "beach", "farm", "castle", "meadow", "cave"]
OBJECTS = ["ball", "key", "hat", "book", "stone", "flower", "map", "bell", "kite", "lantern"]
FEELINGS = ["happy", "proud", "surprised", "tired", "glad", "excited"]
