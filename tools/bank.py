"""Write the bank of background queries that ships with the package: src/seps/assets/bank/sentences.txt.

    python tools/bank.py

The sentences are composed from the scenes below, which were written for this project: who, does what, where. They describe
everyday photos in the style of captions and come from no data set, so that the bank knows no query that is measured.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "src" / "seps" / "assets" / "bank" / "sentences.txt"
COUNT = 1564
"""Sentences of the bank, the last of which calibrate the confidence (`seps.retrieval.index.bank.ASKED`)."""

LISTS = {
    "colour": "red/red/blue/blue/black/black/white/white/brown/green/yellow/orange/pink/grey/purple",
    "top": "shirt/jacket/sweater/coat/t-shirt/hooded top/vest/uniform/raincoat/dress",
    "man": "man/young man/old man/bearded man/bald man/tall man/man in a {colour} {top}/man wearing a {colour} cap",
    "woman": "woman/young woman/old woman/blonde woman/dark-haired woman/lady/woman in a {colour} {top}/"
    "woman wearing sunglasses",
    "boy": "boy/little boy/young boy/small boy/teenage boy/boy in a {colour} {top}/boy with curly hair/shirtless boy",
    "girl": "girl/little girl/young girl/small girl/teenage girl/girl in a {colour} {top}/girl with a ponytail/"
    "girl with pigtails",
    "child": "child/small child/toddler/{boy}/{girl}",
    "adult": "{man}/{woman}/person",
    "somebody": "{man}/{woman}/{boy}/{girl}/person",
    "people": "two men/two women/three friends/a couple/a group of people/several people/a man and a woman/four teenagers/"
    "some tourists",
    "children": "two boys/two girls/three children/a boy and a girl/a group of children/two small children/several kids/"
    "two toddlers",
    "dog": "dog/{colour_of_dog} dog/small {colour_of_dog} dog/large {colour_of_dog} dog/fluffy dog/puppy/spotted dog/"
    "long-haired dog/poodle/collie/terrier/greyhound/bulldog/retriever",
    "colour_of_dog": "black/brown/white/tan/yellow/grey/black and white/brown and white",
    "dogs": "two dogs/three dogs/two {colour_of_dog} dogs/a big dog and a small dog/a pack of dogs/two puppies/"
    "a {colour_of_dog} dog and a {colour_of_dog} dog",
    "land": "on a dirt road/on a path/in a park/in a field/near some trees/on a hill/beside a fence/in the countryside",
    "water": "in the water/in the sea/in a lake/in a river/in shallow water/in the waves/near the shore",
    "town": "on a busy street/on the sidewalk/in front of a shop/at a street corner/in a city square/next to a brick wall/"
    "outside a cafe/in an alley/on the steps of a building",
    "room": "in a living room/in a kitchen/at a table/on a couch/in a bedroom/on the floor/by a window/in a hallway",
    "snow": "in the snow/on a snowy hill/on a frozen lake/in a snow-covered forest/on a white slope",
    "audience": "in front of a crowd/while people watch/in front of spectators//",
}
"""Word lists; `{name}` draws one, and an empty entry adds nothing."""

IRREGULAR = {"have": "has", "go": "goes", "do": "does", "leave": "leaves", "are": "is"}
FORMS = ("present", "present", "progressive", "progressive", "participle")
CLOTHED = 0.35
"""Part of the people whose clothes are named."""
PERSON = re.compile(
    r"\b(man|woman|boy|girl|lady|child|toddler|person|player|men|women|boys|girls|people|rider|worker|children|kids|couple"
    r"|skier|snowboarder|surfer|climber|hiker|cyclist|vendor|farmer|singer|dancer|teenagers|friends|tourist)s?$"
)
CLOTHES = (
    "in a {colour} {top}", "in a {colour} {top} and {colour} pants", "wearing a {colour} {top}",
    "wearing a {colour} {top} and a {colour} hat", "in {colour} shorts", "wearing jeans and a {colour} {top}",
    "dressed in {colour}", "with a {colour} backpack", "in a {colour} hat and a {colour} {top}", "with long hair",
)  # fmt: skip
EXTRA = 0.15
"""Part of the sentences that name what else the photo shows."""
AROUND = (
    "with trees in the background", "while a {somebody} watches", "while another person looks on",
    "as a crowd watches", "near a parked car", "on a sunny day", "with buildings in the background",
    "as the sun sets", "with mountains in the distance", "while people walk by", "next to a {colour} wall",
    "in front of a {colour} building", "near a wooden fence", "with a {dog} beside them", "on a cloudy day",
    "next to a {woman}", "next to a {man}", "with a {colour} sign behind", "under a large tree",
)  # fmt: skip
NO_VERBS = (
    "with",
    "full",
    "under",
    "at",
    "on",
    "after",
    "beside",
    "behind",
    "in",
    "between",
    "surrounded",
    "covered",
    "seen",
)
"""First words of second parts that have no verb."""

SCENES = """
# Dogs: 4
a {dog} | runs/is running/walks/trots/lies down/is jumping/sniffs the ground/plays | on the grass/{land}/across the lawn/through tall grass/through fallen leaves
a {dog} | carries a stick/catches a frisbee/holds a tennis ball in its mouth/chases a ball/tugs on a rope/chews on a bone/fetches a {colour} toy/jumps for a flying disc | on the grass/in the yard/{land}/in a garden/in mid-air
a {dog} | swims/splashes/stands/wades/runs/shakes itself dry/paddles with a stick | {water}/through a puddle/along the beach/through a stream
a {dog} | runs/plays/digs/stands/leaps/rolls | {snow}/through deep snow
{dogs} | run/play/fight/wrestle/race/chase each other/run side by side/sniff each other/pull at the same toy | on the grass/on the beach/in the yard/{snow}/{land}/{water}/on a path
a {dog} | jumps over a hurdle/runs through a tunnel/weaves between poles/walks over a ramp/leaps over a bar/races around a track | at a dog show/in an agility course//with a number on its side
a {dog} wearing a {colour} collar | looks up/sits/yawns/barks/pants/waits/stares at the camera | on the grass/on a porch/by the door/on the sand/on a leash/beside a car
a {dog} | sleeps/lies/sits/curls up | on a couch/on a bed/on a rug/in a basket/by the fireplace/under a table/on a {colour} blanket
a {somebody} | walks/pets/hugs/feeds/plays with/kneels beside/throws a ball for/holds | a {dog} | {land}/on the beach/in the yard/on a leash/in the snow/
# People: 2
a {adult}/a cowboy/a jockey/a {girl} | rides a horse/rides a bucking bull/leads a pony/jumps a horse over a fence/falls from a horse | at a rodeo/in an arena/on a beach/on a trail/{audience}
a {child} | plays/runs/laughs/crawls/dances/spins around/falls down/jumps | on the grass/in a garden/in a park/in a sprinkler/through a pile of leaves/in a fountain/in a meadow of flowers
a {child} | slides down a slide/swings on a swing/climbs on the bars/hangs upside down/crawls through a tunnel/rides a seesaw/climbs a rope net/sits on a spinning wheel | at the playground/in a park/in a schoolyard/
a {child} | jumps into a pool/goes down a water slide/floats on an inflatable ring/swims underwater/splashes/wears goggles/stands at the edge of the pool/leaps from a diving board | in a swimming pool/on a sunny day/with arms spread/
a {child} | digs/builds a sandcastle/runs from the waves/collects shells/fills a {colour} bucket/buries both feet/plays with a shovel/flies a kite | on the beach/in the sand/by the ocean/at the water's edge
a {child} | eats/holds/reaches for/drops/shares/licks | an ice cream cone/a slice of watermelon/a piece of cake/a bowl of noodles/an apple/a sandwich/a cookie/a lollipop | at a table/in a high chair/on the steps/with a messy face/
a {child} | blows/chases/pops/looks at | bubbles/soap bubbles/a dandelion/birthday candles/a {colour} balloon/a pinwheel | in the yard/at a party/in a park/
a {child} | rides/pushes/falls off/learns to ride | a {colour} bicycle/a tricycle/a scooter/a toy car/a wagon/a wooden horse | {land}/on the sidewalk/on a driveway/
a {child} | paints/draws/reads/plays with blocks/does homework/builds a tower/cuts paper/plays with a toy train/sleeps with a teddy bear/brushes teeth | {room}/on a rug/in a classroom/
{children} | play/laugh/hold hands/run/make faces/sit/whisper/jump/pose for a picture/pile on top of each other | on the grass/on a bed/on a trampoline/on the beach/on the stairs/on a bench/in a fountain/in a playground
{children} | play soccer/kick a ball/play tag/climb a tree/wade in a creek/have a pillow fight/blow bubbles/ride bikes/build a snowman/play in the mud/squirt water at each other | in the yard/in the street/in a field/together/on a summer day
a {adult}/a {boy}/two teenagers | rides a skateboard/does a skateboard trick/grinds on a rail/jumps with a skateboard/falls off a skateboard/flips a skateboard | on a ramp/at a skate park/down some stairs/over a bench/in an empty pool/on a concrete wall/{audience}
a {adult}/a {boy}/a cyclist in a helmet | rides a bike/jumps with a bike/does a bike trick/rides a mountain bike/races on a bicycle/does a wheelie | on a dirt trail/over a ramp/through the woods/down a rocky slope/{town}/in mid-air/through a mud puddle
{children}/two women/a {man}/a team/volleyball players/rugby players/hockey players | play volleyball/jump at the net/dive for the ball/play rugby/play hockey/play ping pong/play badminton/throw a frisbee | on the sand/in a gym/on the beach/on the field/in a park/{audience}
a {adult}/two people/a kayaker/three people in helmets/a man in a {colour} canoe | paddles/rows/goes over a waterfall/drifts/steers a raft/paddles a kayak | through rapids/on a calm lake/down a river/past some rocks/under a bridge/at dawn
a {adult}/{people}/a camper | sits by a fire/puts up a tent/roasts marshmallows/cooks on a camp stove/sleeps in a hammock/lights a fire | in the woods/at a campsite/at night/beside a lake/
a {child}/{children}/a {adult} | sleds/throws a snowball/shovels snow/builds a snowman/makes a snow angel/ice skates/pulls a sled/walks | {snow}/in front of a house/in a winter coat/in the park
a {adult} | sits/waits/sleeps/reads a newspaper/talks on the phone/smokes a cigarette/eats a sandwich/drinks coffee/feeds pigeons/looks at a map | on a bench/{town}/at a bus stop/under an umbrella/
{people} | walk/wait/cross the street/talk/stand in line/look in a shop window/hail a taxi/ride an escalator/shop/push a stroller | {town}/in the rain/at night/at a crossing/in a market/under neon signs
{people}/dancers in costumes/a couple/performers in masks/women in {colour} dresses | dance/march/wave/parade/clap | in a parade/{town}/at a wedding/on a wooden floor/at a carnival/in a circle
{people}/a family/friends/a couple/coworkers | eat/drink beer/drink wine/laugh/raise their glasses/share a pizza/have dinner/play cards/celebrate a birthday | at a restaurant/around a table/in a bar/on a terrace/by candlelight/at a party
a {adult} | vacuums/irons a shirt/watches television/plays a video game/sleeps/plays the piano/knits/folds laundry/plays chess/hangs a picture/sews a button | {room}/in a small apartment/
a {adult} | mows the lawn/rakes leaves/waters the plants/plants flowers/picks apples/chops wood/washes a car/hangs laundry/feeds chickens/pushes a wheelbarrow | in the garden/in the yard/in an orchard/on a farm/in front of a house
a {adult} | jumps/does yoga/lifts weights/stretches/runs/does push-ups/jumps rope/practices tai chi | on the beach/in a park/in a gym/on a rooftop/at sunrise/on a mat/in the sand
a {adult}/a tourist/a photographer/{people} | takes a picture/holds a camera/poses/points/looks through binoculars/takes a selfie | in front of a statue/at a monument/by a fountain/on a bridge/of the mountains/of a {colour} flower/in front of a castle
a {adult}/a {girl}/a couple | walks/stands/looks out/sits/runs/lies/carries shoes | on the beach at sunset/at the end of a pier/on a rocky shore/in the waves/on a cliff above the sea/on a wet beach
a {somebody} | smiles/laughs/sticks out a tongue/looks away/covers the face/makes a funny face/blows a kiss/looks at the camera | in a close-up/with a {colour} scarf/with face paint/behind a glass window/in a hat/with wet hair/
a {somebody} in a {colour} {top} | stands/leans/sits/waits/jumps/points/waves/walks/squats | against a brick wall/in front of a graffiti wall/on a railing/on a rooftop/beside a {colour} door/on the stairs/on a wall/in a doorway
# Sports, work, events: 1
a flock of birds/several seagulls/two ducks/a swan/some geese/a heron | flies/swims/floats/stands/lands | over the water/on a pond/on the shore/near some reeds/over the rooftops
a horse/a {colour_of_dog} horse/two horses/a foal/a white pony | gallops/grazes/stands/drinks/trots/looks over a fence | in a meadow/behind a wooden fence/in a dusty yard/near a barn/in the snow
a baby | smiles/cries/sleeps/crawls/sits/drinks from a bottle/plays with a toy/takes a bath/chews on a spoon | in a crib/on a blanket/in a stroller/in a {adult}'s arms/on the carpet/in a plastic tub/
a mother/a father/a grandmother/a grandfather/a {adult} | holds/carries/kisses/reads to/feeds/lifts/hugs/dances with | a baby/a small child/a {girl}/a {boy}/a newborn | in a park/on a couch/on the beach/in a kitchen/at the window/
a family | has a picnic/poses/eats dinner/walks/opens presents/plays a board game/sits around a table/waits | in a park/by a lake/in front of a tree/on a bridge/at a campsite/on the beach/in a restaurant
several cyclists/a group of runners/two joggers/marathon runners | race/ride/run/turn a corner/pass/cross the finish line | on a road/past spectators/through the city/up a steep hill/in the rain/over a bridge
a motorcyclist/a rider on a {colour} motorcycle/a dirt bike rider/a person on a quad bike/a motocross racer | jumps/races/leans into a turn/flies through the air/kicks up dirt/speeds | on a muddy track/over a hill/around a corner/in the sand/{audience}
a {colour} race car/a rally car/a truck/an off-road vehicle/a jeep/an old car | drives/slides/splashes/speeds/climbs/turns | through a puddle/around a bend/over rocks/on a dirt road/down a hill/on a race track
a soccer player/two soccer players/a {girl}/a goalkeeper/a player in {colour} | kicks the ball/chases the ball/dives for the ball/heads the ball/fights for the ball/celebrates a goal/slides on the grass | on a soccer field/during a game/{audience}
a football player/two football players/a quarterback/a player in a {colour} jersey | runs with the ball/throws the football/is tackled/catches the ball/blocks an opponent/falls into the end zone/listens to the coach | during a game/on the field/{audience}/under the lights
a baseball player/a pitcher/a batter/a {boy}/a catcher/a softball player | swings the bat/throws the ball/slides into base/catches a ball/waits for the pitch/runs to first base/stretches for a catch | on a baseball field/during a game/in a cloud of dust/{audience}
a basketball player/two basketball players/a {boy}/a {man}/a player in a {colour} uniform | dribbles/shoots the ball/jumps for a rebound/dunks/passes the ball/blocks a shot | on an outdoor court/in a gym/during a game/{audience}
a tennis player/a {woman}/a {man}/a {girl} | hits a tennis ball/serves/swings a racket/reaches for the ball/waits for the ball/throws a ball into the air | on a clay court/on a tennis court/on a grass court/during a match
a gymnast/a dancer/a ballerina/a cheerleader/a {girl}/an acrobat | jumps/does a handstand/balances/does a cartwheel/spins/stretches/does the splits/does a backflip | on a beam/on a mat/on stage/on the beach/on the grass/{audience}
a wrestler/two wrestlers/a boxer/two boxers/two men in karate suits/a fencer | fight/train/bow/throw punches/compete/roll on the floor | in a ring/on a mat/in a gym/{audience}
a golfer/a {man} | hits a golf ball/lines up a putt/swings a club/walks/looks at the flag | on the green/from a sand trap/on a golf course/under a cloudy sky
a surfer/a {man} in a wetsuit/a {woman} with a surfboard/a surfer on a {colour} board | rides a wave/falls off a surfboard/paddles out/carries a board/jumps over a wave/balances on a board | in the ocean/at sunset/along the beach/in rough water
a {man}/a {woman}/a water skier/a wakeboarder/a windsurfer/a kite surfer | is pulled by a boat/jumps over the waves/holds on to a rope/glides/does a flip/leans back | on a lake/behind a motorboat/in the sea/near the coast
a fisherman/a {man}/a {boy}/two men/an old man | holds a fish/casts a line/fishes/mends a net/waits/stands with a fishing rod | on a pier/in a small boat/in a river/on the rocks/by a pond/at sunrise
a swimmer/a diver/a {man}/a {girl}/{people} | dives/jumps/swims/floats/snorkels/leaps from a rope | into a lake/into the sea from a cliff/in a pool/off a dock/in clear water/from a boat
a {man}/a {woman}/a rock climber/a climber in a {colour} helmet/two climbers | climbs/hangs from a rope/reaches for a hold/rappels/looks down/rests on a ledge | on a cliff/on a rock face/on an indoor climbing wall/up a steep mountain/on a frozen waterfall
a hiker/{people}/two hikers with backpacks/a {man} with a backpack/a {woman} with walking poles | hike/walk/rest/look at the view/cross a stream/stand/take a break/sit on a rock | on a mountain trail/on top of a hill/in a canyon/above the clouds/in the forest/near a waterfall/in the desert
a skier/a snowboarder/a skier in a {colour} suit/a {boy} on skis/two skiers | jumps/goes downhill/does a trick/falls/turns/stands/slides down a rail/waits for the lift | {snow}/in deep powder/off a ramp/between flags/under a blue sky
a figure skater/a hockey player/{children}/an ice skater | skates/spins/falls/chases the puck/glides | on the ice/in an ice rink/on a frozen pond/
a street musician/a {man} with a guitar/a violinist/a drummer/a {woman}/an accordion player/a saxophone player | plays/sings/performs/tunes an instrument/smiles | {town}/in a subway station/on a small stage/{audience}
a band/a singer/a guitarist/a rock band/a choir/a {man} with a microphone/an orchestra/a DJ | performs/sings/plays/jumps/bows | on stage/under bright lights/at a festival/in a dark club/in a church/{audience}
a bride and groom/a bride/wedding guests/a couple | kiss/dance/cut the cake/pose/walk/throw rice/hold hands | in front of a church/on the beach/in a garden/under an arch/
a crowd/protesters/fans/spectators/people with signs | cheer/march/wait/hold up flags/gather/watch a game/wave | {town}/in a stadium/at a concert/behind a barrier/in front of a stage
a clown/a man in a costume/a {child} in a costume/a person in a bear suit/a man dressed as a pirate/a woman with a painted face | juggles/poses/waves/makes balloon animals/dances/rides a unicycle | {town}/at a party/at a fair/{audience}
a construction worker/two workers/a {man} in a hard hat/a painter/a carpenter/a roofer | climbs a ladder/cuts wood/digs/paints a wall/lays bricks/drills/carries a plank | at a building site/on a roof/on the road/beside a crane/
a police officer/a firefighter/a soldier/a guard/a nurse/a doctor/a sailor/a postman | stands/talks to a child/salutes/puts out a fire/rides a horse/helps a patient/waits/marches | {town}/in front of a building/in uniform/beside a {colour} vehicle
a vendor/a farmer/a {woman}/a {man}/a fishmonger/a florist | sells/weighs/arranges/carries/buys/washes | fruit/vegetables/flowers/fresh fish/bread/baskets of apples/balloons/spices | at an outdoor market/from a cart/{town}/in a small shop
a chef/a cook/a {man}/a {woman}/a baker/a {girl} | cooks/stirs a pot/cuts vegetables/grills meat/rolls dough/flips a pancake/decorates a cake/washes dishes/pours tea | in a kitchen/in a restaurant/over an open fire/in a bakery/at a barbecue
a {man}/a {woman}/a student/a teacher/two coworkers/an artist | types on a laptop/reads a book/writes on a blackboard/gives a talk/paints a picture/studies/looks through a microscope/fixes a computer | in an office/in a library/in a classroom/in a studio/{room}
a {man}/a {boy}/a worker/a farmer | drives a tractor/rides a donkey cart/loads a truck/pushes a broken car/changes a tire/repairs a bicycle/pulls a cart full of hay | {land}/on a muddy road/at the side of the road/in a garage/in a village
a {girl}/a {boy}/a {woman}/a {man} in a swimsuit | plays/stands/lies/sits/laughs/sprays water/floats/reads | under a waterfall/in a fountain/by the pool/on a beach towel/with a garden hose/on an air mattress/under a beach umbrella
# Other animals, vehicles, food, rooms, landscapes: 0.5
a cat | sleeps/sits/stretches/looks out/hides/licks its paw | on a windowsill/on a couch/in a cardboard box/on a wooden fence/under a car/on a roof/on a keyboard
a {colour} bird | sits/perches/spreads its wings/sings/takes off/pecks at seeds | on a branch/on a fence post/on a feeder/on the railing/in a tree
some cows/a herd of sheep/two goats/a donkey/a flock of chickens/a pig/several cattle | grazes/rests/stands/walks/waits to be fed | in a green field/on a farm/on a mountain road/in a pen/behind a wire fence
an elephant/a giraffe/a lion/a zebra/a monkey/a bear/a deer/a tiger/a kangaroo | stands/drinks/eats leaves/rests in the shade/walks/looks around | at the zoo/beside a waterhole/among dry grass/near some rocks/in the forest
a butterfly/a bee/a dragonfly/a snail/a frog/a squirrel/a lizard/a turtle | rests/crawls/sits/climbs | on a leaf/on a {colour} flower/on a stone/on a tree trunk/in someone's hand
a school of fish/a {colour} fish/a shark/a jellyfish/a dolphin/two whales | swims/glides/turns/leaps | above a coral reef/in an aquarium/in clear blue water/beside a boat
a bus/a {colour} bus/a tram/a taxi/a delivery van/a fire truck/an ambulance/a {colour} car | stops/is parked/drives/waits/turns | on a busy street/at a traffic light/in front of a hotel/in the rain/on a narrow road/in a snowstorm
a train/a steam train/a freight train/a subway train | passes/arrives/waits/crosses a bridge/leaves | at a station/through the mountains/beside a platform/in a tunnel/through green fields
an airplane/a helicopter/a small plane/a hot air balloon/a paraglider/a {colour} kite | flies/lands/takes off/hovers/floats | over the city/in a clear blue sky/above the clouds/over a field/at the airport/over the sea
a sailboat/a ferry/a fishing boat/a {colour} rowboat/a cruise ship/several boats | sails/floats/is tied up/passes/leans in the wind/rests | in a harbor/on a lake/near a lighthouse/at sunset/on a sandy shore/under a bridge
a bicycle/several bicycles/a {colour} scooter/a parked motorcycle/an empty shopping cart | leans/stands/lies/is chained | against a wall/next to a canal/in front of a shop/on a cobblestone street/against a fence
a plate of pasta/a pizza/a bowl of soup/a hamburger/a plate of sushi/a fruit salad/a chocolate cake/a loaf of bread/a cup of coffee/a glass of wine | stands/is served/sits/lies | on a wooden table/with a fork and a knife/on a {colour} plate/next to a candle/on a tray/beside a newspaper
a vase of flowers/a laptop/a stack of books/a guitar/a clock/a pair of shoes/an old camera/a teddy bear/a lamp | stands/lies/is left | on a desk/on a shelf/on a wooden floor/by the window/next to a {colour} chair/on a bed
a kitchen/a bedroom/a living room/an empty classroom/a bathroom/an office | with white walls/with a large window/with {colour} furniture/full of plants/with a wooden floor/with lamps hanging from the ceiling
a mountain/snowy mountains/a valley/green hills/a desert/sand dunes/a canyon | under a cloudy sky/at sunset/behind a lake/in the morning fog/in autumn/under a full moon/in bright sunlight
a lake/a waterfall/a river/a stream/a frozen pond/the ocean | between rocks/in a forest/surrounded by mountains/with a small wooden bridge/in the evening light/under a rainbow/with mist above the water
a lighthouse/a castle/a church/a windmill/a barn/an old stone house/a temple/a bridge | stands/rises/is reflected/is covered with ivy | on a hill/by the sea/among trees/beside a river/in a small village/at dusk
a city/a skyline/an empty street/a market square/a narrow alley/tall buildings | at night/with lights reflected in the water/in the rain/covered in snow/seen from above/on a foggy morning/with people walking
a field of {colour} flowers/a garden/rows of tulips/a tree with {colour} leaves/a path through the forest/a vineyard | in spring/in autumn/on a sunny day/after the rain/under a blue sky/beside a fence
fireworks/a carousel/a ferris wheel/a roller coaster/lanterns/a bonfire | light up/turns/glows/stands/shines | in the night sky/at an amusement park/over the river/behind a crowd/at a street festival
"""


def main() -> None:
    """Write the file."""
    lines = compose(COUNT)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} sentences: {OUT}")


def compose(count: int) -> list[str]:
    """`count` different sentences in random order, drawn with a fixed seed."""
    draw, shares, share = random.Random(0), {}, 1.0
    for line in SCENES.strip().splitlines():
        if line.startswith("#"):
            share = float(line.rpartition(":")[2])
        else:
            shares[line] = share
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        sentences[sentence(draw.choices(list(shares), list(shares.values()))[0], draw)] = None
    return list(sentences)


def sentence(scene: str, draw: random.Random) -> str:
    """A sentence of a scene: one entry of each of its parts, and sometimes what else the photo shows."""
    subject, verb, *others = (fill(draw.choice(part.strip().split("/")), draw) for part in scene.split("|"))
    plural = is_plural(subject)
    if PERSON.search(subject) and " in a" not in subject and " wearing" not in subject and draw.random() < CLOTHED:
        subject = f"{subject} {fill(draw.choice(CLOTHES), draw)}"
    if draw.random() < EXTRA:
        others.append(fill(draw.choice(AROUND), draw))
    form = draw.choice(FORMS)
    words = " ".join(" ".join([subject, conjugate(verb, form, plural), *others]).split())
    words = re.sub(r"\ba (?=[aeio]|u(?!ni))", "an ", words)
    return words[0].upper() + words[1:] + "."


def fill(text: str, draw: random.Random) -> str:
    """The text with a drawn entry in the place of each `{name}`."""
    while names := re.findall(r"\{(\w+)\}", text):
        text = text.replace(f"{{{names[0]}}}", draw.choice(LISTS[names[0]].split("/")), 1)
    return text


def is_plural(subject: str) -> bool:
    """Whether a subject takes a plural verb."""
    several = re.search(r"\band an? |bride and groom|\bcouple\b", subject)
    return several is not None or not re.match(r"an? ", subject)


def conjugate(verb: str, form: str, plural: bool) -> str:
    """A verb phrase, written in the singular or the plural, in a form and in the number of its subject."""
    first, _, rest = verb.partition(" ")
    if first in NO_VERBS or first in ("is", "are"):
        return f"{'are' if plural else 'is'} {rest}" if first not in NO_VERBS else verb
    base = base_form(first)
    if form == "present":
        return f"{base if plural else singular_form(base)} {rest}"
    return f"{'' if form == 'participle' else 'are ' if plural else 'is '}{participle(base)} {rest}"


def base_form(verb: str) -> str:
    """`fly` for `flies`; a verb in the plural stays as it is."""
    if verb in IRREGULAR.values():
        return next(base for base, singular in IRREGULAR.items() if singular == verb)
    if verb in IRREGULAR or not verb.endswith("s") or verb.endswith("ss"):
        return verb
    if len(verb) > 4 and re.search(r"[^aeiou]ies$", verb):
        return verb[:-3] + "y"
    return verb[:-2] if re.search(r"(ch|sh|ss|x)es$", verb) else verb[:-1]


def singular_form(base: str) -> str:
    """`flies` for `fly`."""
    if base in IRREGULAR:
        return IRREGULAR[base]
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ies"
    return base + ("es" if re.search(r"(ch|sh|ss|x|z)$", base) else "s")


def participle(base: str) -> str:
    """`running` for `run`."""
    if base.endswith("ie"):
        return base[:-2] + "ying"
    if base.endswith("e") and not base.endswith("ee"):
        return base[:-1] + "ing"
    if re.fullmatch(r"[^aeiou]*(qu)?[aeiou][^aeiouwxy]", base):
        return base + base[-1] + "ing"
    return base + "ing"


if __name__ == "__main__":
    main()
