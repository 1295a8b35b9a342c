"""Words that most tokenizers of English text hold as one token, after a space."""

_WORDS = """
anchor apple arrow banana barrel basket battery beetle bicycle blanket boat bottle bread bridge
butter button camel camera candle canyon carpet carrot castle chair cheese circle clock cloud
coffee copper corner cotton cousin crystal curtain dancer desert diamond dinner doctor dolphin
donkey dragon eagle elephant engine farmer feather finger flower forest fountain garden glass
green guitar hammer harbor horse hotel iron island jacket jungle kitchen knight ladder leather
lemon letter library machine market meadow medal metal mirror monkey mountain mouse museum
needle nurse ocean office onion orange oven painter palace paper parade pearl pencil pepper
piano pillow pilot planet pocket potato prince pumpkin queen rabbit radio rainbow ribbon river
rocket saddle sailor salmon sand school shadow ship shirt shoulder signal silver singer soldier
spider spoon square station stone storm student sugar summer table teacher temple theater thread
ticket tiger tomato tower tractor train turtle uncle valley velvet vessel village violin wagon
whale wheel window winter wolf
"""
_CITIES = """
Athens Atlanta Beijing Berlin Boston Budapest Cairo Chicago Dallas Delhi Denver Dublin Florence
Geneva Hamburg Havana Helsinki Houston Lima Lisbon London Madrid Melbourne Miami Milan Montreal
Moscow Mumbai Munich Naples Orlando Oslo Paris Phoenix Prague Rome Seattle Seoul Stockholm
Sydney Tokyo Toronto Venice Vienna Warsaw
"""
_FIRST_NAMES = """
Alice Anna Ben Brian Carol Clara Daniel David Emma Eric Frank Grace Helen Henry Iris Jack James
Kate Laura Leo Mary Noah Olivia Paul Peter Rose Sam Susan Victor
"""
_LAST_NAMES = """
Adams Baker Brown Carter Clark Cooper Davis Evans Fisher Foster Gray Green Hall Harris Hill
Howard Hughes Hunt Jackson Johnson Kelly King Lewis Martin Miller Moore Morgan Nelson Parker
Phillips Reed Rogers Scott Smith Stewart Taylor Turner Walker White Young
"""

WORDS = _WORDS.split()
CITIES = _CITIES.split()
FIRST_NAMES = _FIRST_NAMES.split()
LAST_NAMES = _LAST_NAMES.split()
