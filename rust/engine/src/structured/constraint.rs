//! One sequence on its way through a grammar.

use std::fmt;
use std::time::{Duration, Instant};

use llguidance::Matcher;

use super::vocabulary::first_line;
use super::{ConstraintError, Grammar, TokenMask};
use crate::FinishReason;

/// What may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// One of these tokens; the stop ids are among them where the output may end.
    Tokens(TokenMask),
    /// Nothing: the output is complete.
    End,
}

impl Next {
    /// What a matcher allows where it is.
    pub fn of(matcher: &mut Matcher, vocab_size: usize, stop_ids: &[u32]) -> Result<Self, Stuck> {
        let mask = matcher.compute_mask().map_err(|error| Stuck::new(&error.to_string()))?;
        // The vocabulary has one more token, which stands for the end.
        let may_end = mask.is_allowed(vocab_size as u32);
        let mask = TokenMask::new(mask.into(), vocab_size).without(stop_ids);
        match (mask.count(), may_end) {
            (0, true) => Ok(Self::End),
            (0, false) => Err(Stuck::NothingAllowed),
            (_, true) => Ok(Self::Tokens(mask.with(stop_ids))),
            (_, false) => Ok(Self::Tokens(mask)),
        }
    }
}

/// Why a matcher does not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stuck {
    /// No token is allowed, and this is no end.
    NothingAllowed,
    /// What it said.
    Matcher(String),
}

impl Stuck {
    fn new(message: &str) -> Self {
        // So the matcher says that the mask is empty.
        if message.starts_with("NoExtension") { Self::NothingAllowed } else { Self::Matcher(first_line(message)) }
    }
}

/// A grammar, and how far a sequence has come in it.
pub(crate) struct Constraint {
    matcher: Matcher,
    ahead: Ahead,
    vocab_size: usize,
    /// Tokens that end the request; no text of the grammar's, whatever their bytes.
    stop_ids: Vec<u32>,
    /// Tokens so far.
    tokens: usize,
    /// Of the tokens so far, once it was asked for.
    next: Option<Result<Next, ConstraintError>>,
    /// How long the latest mask took.
    took: Duration,
}

/// Where guesses are walked. What they lead to fills tables and may meet a limit, for good: so it has tables of its
/// own, and what the sequence gets depends on its own tokens alone.
enum Ahead {
    /// Nothing was guessed yet.
    Unmade,
    /// A matcher, and the tokens of the sequence that it has not followed yet.
    At(Box<Matcher>, Vec<u32>),
    /// It met a limit. The sequence goes on without guesses.
    Lost,
}

/// A mask that takes longer is worth a thread: starting one takes some tens of microseconds, and where all processors
/// compute the forward pass it holds one of them up. Of 128,256 tokens one of a usual schema takes 10 (`llguidance`
/// keeps what it has found out), of one with hundreds of optional properties some hundreds.
const SLOW: Duration = Duration::from_micros(300);
/// Tokens that can be each other's beginning: none of a real vocabulary has more that are.
const FEW: usize = 64;

impl Constraint {
    /// At the beginning of the output.
    pub fn new(grammar: &Grammar, stop_ids: &[u32]) -> Self {
        let (matcher, vocab_size) = (grammar.matcher(), grammar.vocab_size());
        let stop_ids = stop_ids.to_vec();
        Self { matcher, ahead: Ahead::Unmade, vocab_size, stop_ids, tokens: 0, next: None, took: Duration::ZERO }
    }

    /// Makes the mask, if it is not there yet.
    pub fn prepare(&mut self) {
        if self.next.is_none() {
            let begin = Instant::now();
            let next = Next::of(&mut self.matcher, self.vocab_size, &self.stop_ids);
            self.took = begin.elapsed();
            self.next = Some(next.map_err(|stuck| self.error(stuck)));
        }
    }

    /// Whether its masks take so long that they are better made beside something else.
    pub fn is_slow(&self) -> bool {
        self.next.is_none() && self.took > SLOW
    }

    /// What may come next.
    ///
    /// # Errors
    /// [`ConstraintError`] where the sequence cannot go on.
    pub fn next(&mut self) -> Result<&Next, ConstraintError> {
        self.prepare();
        match &self.next {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(error.clone()),
            None => Ok(&Next::End),
        }
    }

    /// Up to so many tokens for what must come next, the longest that fit; none where there is a choice, or masks take
    /// long. The model may write the same with other tokens: this is a guess, and no mask.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        if self.is_slow() {
            return tokens;
        }
        self.prepare();
        let mut next = self.next.as_ref().and_then(|next| self.longest(next.as_ref().ok()?));
        if next.is_none() {
            return tokens;
        }
        let (vocab_size, stop_ids) = (self.vocab_size, self.stop_ids.clone());
        // A copy shares the tables of what is copied, and that is no concern of the sequence.
        let Some(mut ahead) = self.ahead().map(|ahead| ahead.clone()) else { return tokens };
        while let Some(token) = next.filter(|_| tokens.len() < most) {
            tokens.push(token);
            if ahead.consume_token(token).is_err() || ahead.is_stopped() {
                break;
            }
            next = Next::of(&mut ahead, vocab_size, &stop_ids).ok().and_then(|next| self.longest(&next));
        }
        tokens
    }

    /// A matcher for guesses, where the sequence is; none where one has met a limit.
    fn ahead(&mut self) -> Option<&mut Matcher> {
        if let Ahead::Unmade = self.ahead {
            self.ahead = Ahead::At(Box::new(self.matcher.deep_clone()), Vec::new());
        }
        if let Ahead::At(matcher, behind) = &mut self.ahead {
            let followed = matcher.consume_tokens(behind);
            behind.clear();
            if followed.is_err() || matcher.is_error() {
                self.ahead = Ahead::Lost;
            }
        }
        match &mut self.ahead {
            Ahead::At(matcher, _) => Some(matcher),
            Ahead::Unmade | Ahead::Lost => None,
        }
    }

    /// The one of a few tokens that all others are the beginning of.
    fn longest(&self, next: &Next) -> Option<u32> {
        let Next::Tokens(mask) = next else { return None };
        if mask.count() > FEW {
            return None;
        }
        let environment = self.matcher.tok_env().ok()?;
        let bytes = |token: u32| environment.tok_trie().token(token);
        let longest = mask.tokens().max_by_key(|&token| bytes(token).len())?;
        mask.tokens().all(|token| bytes(longest).starts_with(bytes(token))).then_some(longest)
    }

    /// How many of some tokens, the first ones, may come next; none where that cannot be told.
    pub fn admitted(&mut self, tokens: &[u32]) -> usize {
        if tokens.is_empty() {
            return 0;
        }
        let validated = self.ahead().map(|ahead| ahead.validate_tokens(tokens));
        match validated {
            Some(Ok(count)) => count,
            Some(Err(_)) => {
                self.ahead = Ahead::Lost;
                0
            }
            None => 0,
        }
    }

    /// Takes note of a token that is no stop id. Gives why the request ends with it, if it does.
    pub fn end_with(&mut self, token: u32) -> Option<FinishReason> {
        self.next = None;
        if let Err(error) = self.matcher.consume_token(token) {
            return Some(FinishReason::Constraint(self.error(Stuck::new(&error.to_string()))));
        }
        self.tokens += 1;
        if let Ahead::At(_, behind) = &mut self.ahead {
            behind.push(token);
        }
        // It stops where nothing can follow.
        self.matcher.is_stopped().then_some(FinishReason::Complete)
    }

    fn error(&self, stuck: Stuck) -> ConstraintError {
        match stuck {
            Stuck::NothingAllowed => ConstraintError::NothingAllowed { tokens: self.tokens },
            Stuck::Matcher(reason) => ConstraintError::Matcher { tokens: self.tokens, reason },
        }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}
