//! Suffix automaton: an index of all repetitions in a text.
//!
//! A suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985). A state
//! represents all substrings that end at the same positions; its link points to the longest shorter substring that ends
//! at more positions. So the links from the end of the text visit all suffixes, and the edges of a state are the tokens
//! that followed those substrings, without comparing tokens. Adding a token takes amortized constant time and at most
//! two states and three edges.

use std::collections::HashMap;

/// No state or edge.
const NONE: u32 = u32::MAX;
/// State of the empty string.
const ROOT: u32 = 0;

/// Substrings of the text that end at the same positions.
#[derive(Debug, Clone, Copy)]
struct State {
    /// Length of the longest of these substrings, in tokens.
    len: u32,
    /// State of the longest substring that ends at these positions and at others.
    link: u32,
    /// First edge.
    edge: u32,
}

/// A token that followed the substrings of a state.
#[derive(Debug, Clone, Copy)]
struct Edge {
    token: u32,
    /// State of the substrings extended by the token.
    target: u32,
    /// Latest position of the token after them, for states whose shortest substring is at most `longest` tokens.
    latest: u32,
    /// Next edge of the same state.
    next: u32,
}

/// Index of a growing text.
#[derive(Debug, Clone)]
pub(super) struct Repeats {
    states: Vec<State>,
    edges: Vec<Edge>,
    /// Edge of a state and a token.
    index: HashMap<(u32, u32), u32>,
    /// State of the whole text.
    whole: u32,
    /// Maximum length of queried suffixes.
    longest: u32,
    /// Whether latest positions are maintained, which takes up to `longest` operations per token.
    knows_latest: bool,
    /// State of the suffix of `longest` tokens, or of the whole text if that is shorter.
    suffix: u32,
}

/// A token that followed a suffix of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Follower {
    /// The token.
    pub token: u32,
    /// Length of the longest suffix that it followed, up to the queried maximum.
    pub len: usize,
    /// Latest position of the token in the text.
    pub latest: usize,
}

impl Repeats {
    /// Creates the index of an empty text for queries of suffixes up to `longest` tokens.
    pub fn new(longest: usize) -> Self {
        Self {
            states: vec![State { len: 0, link: NONE, edge: NONE }],
            edges: Vec::new(),
            index: HashMap::new(),
            whole: ROOT,
            longest: u32::try_from(longest).unwrap_or(u32::MAX),
            knows_latest: true,
            suffix: ROOT,
        }
    }

    /// Creates an index for [`Repeats::followers_of_longest`] only, with amortized constant time per token.
    pub fn of_longest(longest: usize) -> Self {
        Self { knows_latest: false, ..Self::new(longest) }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.states[self.whole as usize].len as usize
    }

    /// Appends a token to the text.
    pub fn push(&mut self, token: u32) {
        let position = self.states[self.whole as usize].len;
        let mut state = self.suffix;
        while self.knows_latest && state != NONE {
            if let Some(&edge) = self.index.get(&(state, token)) {
                self.edges[edge as usize].latest = position;
            }
            state = self.states[state as usize].link;
        }
        self.extend(token, position);
        // The suffix's state may have been split; then its link is the state.
        self.shorten(position.min(self.longest));
        self.suffix = self.index.get(&(self.suffix, token)).map_or(ROOT, |&edge| self.edges[edge as usize].target);
        self.shorten((position + 1).min(self.longest));
    }

    /// Returns the tokens that followed the suffix of exactly `longest` tokens; none if the text is shorter.
    pub fn followers_of_longest(&self) -> impl Iterator<Item = u32> {
        let is_there = self.len() >= self.longest as usize;
        self.edges_of(if is_there { self.suffix } else { NONE }).map(|edge| edge.token)
    }

    /// Returns the tokens that followed suffixes of `shortest` to `longest` tokens, longest suffixes first; a token
    /// occurs once per set of suffixes that it followed at the same positions.
    pub fn followers(&self, shortest: usize, longest: usize) -> impl Iterator<Item = Follower> {
        let link = |state: &u32| Some(self.states[*state as usize].link).filter(|link| *link != NONE);
        let shortest_of = move |state: u32| link(&state).map_or(0, |link| self.states[link as usize].len as usize + 1);
        let longest = longest.min(self.longest as usize);
        std::iter::successors(Some(self.suffix), link)
            .map(move |state| (state, longest.min(self.states[state as usize].len as usize)))
            // A token that followed a longer suffix also followed the shorter ones.
            .skip_while(move |&(state, _)| shortest_of(state) > longest)
            .take_while(move |&(_, len)| len >= shortest)
            .flat_map(move |(state, len)| {
                self.edges_of(state).map(move |edge| Follower { token: edge.token, len, latest: edge.latest as usize })
            })
    }

    fn edges_of(&self, state: u32) -> impl Iterator<Item = Edge> {
        let edge = |index: u32| self.edges.get(index as usize).copied();
        let first = self.states.get(state as usize).and_then(|state| edge(state.edge));
        std::iter::successors(first, move |previous| edge(previous.next))
    }

    /// Moves `suffix` to the state of its last `len` tokens.
    fn shorten(&mut self, len: u32) {
        loop {
            let link = self.states[self.suffix as usize].link;
            if link == NONE || self.states[link as usize].len < len {
                return;
            }
            self.suffix = link;
        }
    }

    fn extend(&mut self, token: u32, position: u32) {
        let new = self.add_state(position + 1);
        let mut state = self.whole;
        self.whole = new;
        let known = loop {
            if state == NONE {
                self.states[new as usize].link = ROOT;
                return;
            }
            if let Some(&edge) = self.index.get(&(state, token)) {
                break self.edges[edge as usize].target;
            }
            self.add_edge(state, Edge { token, target: new, latest: position, next: NONE });
            state = self.states[state as usize].link;
        };
        let len = self.states[state as usize].len + 1;
        if self.states[known as usize].len == len {
            self.states[new as usize].link = known;
            return;
        }
        // The shorter substrings of the existing state end here too, the longer ones do not: split it.
        let shorter = self.add_state(len);
        for edge in self.edges_of(known).collect::<Vec<_>>() {
            self.add_edge(shorter, edge);
        }
        self.states[shorter as usize].link = self.states[known as usize].link;
        self.states[known as usize].link = shorter;
        self.states[new as usize].link = shorter;
        while state != NONE {
            let Some(&edge) = self.index.get(&(state, token)) else { break };
            let edge = &mut self.edges[edge as usize];
            if edge.target != known {
                break;
            }
            edge.target = shorter;
            state = self.states[state as usize].link;
        }
    }

    fn add_state(&mut self, len: u32) -> u32 {
        self.states.push(State { len, link: NONE, edge: NONE });
        self.states.len() as u32 - 1
    }

    fn add_edge(&mut self, state: u32, edge: Edge) {
        let place = self.edges.len() as u32;
        let first = std::mem::replace(&mut self.states[state as usize].edge, place);
        self.edges.push(Edge { next: first, ..edge });
        self.index.insert((state, edge.token), place);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    /// Brute-force oracle: for each token and suffix length, the latest position after that suffix.
    fn brute_force(text: &[u32], shortest: usize, longest: usize) -> BTreeMap<(u32, usize), usize> {
        let mut found = BTreeMap::new();
        for place in 0..text.len() {
            for len in shortest..=longest.min(place) {
                if text[place - len..place] == text[text.len() - len..] {
                    found.insert((text[place], len), place);
                }
            }
        }
        found
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn followers_match_a_brute_force_search(
            text in prop_oneof![prop::collection::vec(0..3_u32, 0..60), prop::collection::vec(0..12_u32, 0..120)],
            shortest in 0..4_usize,
            asked in 0..9_usize,
            longest in 0..9_usize,
        ) {
            let (mut repeats, mut after) = (Repeats::new(longest), Repeats::of_longest(longest));
            for (done, &token) in text.iter().enumerate() {
                prop_assert_eq!(repeats.len(), done);
                repeats.push(token);
                let text = &text[..=done];
                let asked = asked.min(longest);
                let wanted = brute_force(text, shortest, asked);
                let mut found: BTreeMap<(u32, usize), usize> = BTreeMap::new();
                for follower in repeats.followers(shortest, asked) {
                    // A token that followed a suffix also followed its shorter suffixes.
                    for len in shortest..=follower.len {
                        let latest = found.entry((follower.token, len)).or_default();
                        *latest = follower.latest.max(*latest);
                    }
                }
                prop_assert_eq!(found, wanted);
                after.push(token);
                let mut without: Vec<u32> = after.followers_of_longest().collect();
                without.sort_unstable();
                let mut after_longest: Vec<u32> = repeats.followers_of_longest().collect();
                after_longest.sort_unstable();
                let wanted = brute_force(text, longest, longest);
                let wanted: Vec<u32> =
                    wanted.keys().map(|(token, _)| *token).filter(|_| text.len() >= longest).collect();
                prop_assert_eq!(&after_longest, &wanted);
                prop_assert_eq!(without, wanted);
            }
        }
    }

    /// The most repetitive text needs no more states and edges than others.
    #[test]
    fn a_text_of_one_token_is_small() {
        let mut repeats = Repeats::new(50);
        (0..10_000).for_each(|_| repeats.push(7));
        assert_eq!((repeats.states.len(), repeats.edges.len()), (10_001, 10_000));
        let longest = repeats.followers(2, 50).next();
        assert_eq!(longest, Some(Follower { token: 7, len: 50, latest: 9_999 }));
        assert_eq!(repeats.followers(2, 50).count(), 49);
    }

    /// Without latest positions, the time per token does not depend on the suffix length.
    #[test]
    fn the_time_per_token_does_not_depend_on_the_suffix_length() {
        let begin = Instant::now();
        let mut repeats = Repeats::of_longest(1023);
        (0..300_000).for_each(|_| repeats.push(7));
        assert_eq!(repeats.followers_of_longest().collect::<Vec<_>>(), [7]);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}
