//! Grammar state of one sequence.

use std::fmt;
use std::time::{Duration, Instant};

use llguidance::Matcher;

use super::vocabulary::first_line;
use super::{ConstraintError, Grammar, TokenMask};
use crate::FinishReason;

/// Allowed continuations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// One of these tokens, including the stop tokens if the output may end.
    Tokens(TokenMask),
    /// None: the output is complete.
    End,
}

impl Next {
    /// Returns what a matcher allows in its current state.
    pub fn of(matcher: &mut Matcher, vocab_size: usize, stop_ids: &[u32]) -> Result<Self, MatcherError> {
        let mask = matcher.compute_mask().map_err(|error| MatcherError::new(&error.to_string()))?;
        // The vocabulary has one extra token that stands for the end.
        let may_end = mask.is_allowed(vocab_size as u32);
        let mask = TokenMask::new(mask.into(), vocab_size).without(stop_ids);
        match (mask.count(), may_end) {
            (0, true) => Ok(Self::End),
            (0, false) => Err(MatcherError::NothingAllowed),
            (_, true) => Ok(Self::Tokens(mask.with(stop_ids))),
            (_, false) => Ok(Self::Tokens(mask)),
        }
    }
}

/// Reason why a matcher cannot continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MatcherError {
    /// No token is allowed, but the output is not complete.
    NothingAllowed,
    /// The matcher's error message.
    Matcher(String),
}

impl MatcherError {
    fn new(message: &str) -> Self {
        // The matcher's message for an empty mask.
        if message.starts_with("NoExtension") { Self::NothingAllowed } else { Self::Matcher(first_line(message)) }
    }
}

/// A grammar and a sequence's state in it.
pub(crate) struct Constraint {
    matcher: Matcher,
    lookahead: Lookahead,
    vocab_size: usize,
    /// Tokens that end the request. They never match grammar text, whatever their bytes.
    stop_ids: Vec<u32>,
    /// Number of tokens so far.
    tokens: usize,
    /// Allowed continuations of the tokens so far, once computed.
    next: Option<Result<Next, ConstraintError>>,
    /// Time of the latest mask computation.
    took: Duration,
}

/// Matcher for draft tokens. Drafts fill lexer tables and may hit a limit permanently, so they use separate tables, and
/// a sequence's output depends on its own tokens alone.
enum Lookahead {
    /// Not used yet.
    Unused,
    /// A matcher, and the tokens of the sequence that it has not consumed yet.
    Active(Box<Matcher>, Vec<u32>),
    /// The grammar hit a limit; the sequence continues without drafts from the grammar.
    Failed,
}

/// Masks slower than this are computed on another thread: starting one takes tens of microseconds and occupies a
/// processor of the forward pass. For 128,256 tokens a mask of a typical schema takes 10 microseconds (`llguidance`
/// caches results), and of one with hundreds of optional properties some hundreds.
const SLOW_MASK: Duration = Duration::from_micros(300);
/// Maximum number of allowed tokens that can be prefixes of each other; real vocabularies have fewer.
const MAX_FORCED_ALTERNATIVES: usize = 64;

impl Constraint {
    /// Creates the state at the start of the output.
    pub fn new(grammar: &Grammar, stop_ids: &[u32]) -> Self {
        let (matcher, vocab_size) = (grammar.matcher(), grammar.vocab_size());
        let stop_ids = stop_ids.to_vec();
        Self {
            matcher,
            lookahead: Lookahead::Unused,
            vocab_size,
            stop_ids,
            tokens: 0,
            next: None,
            took: Duration::ZERO,
        }
    }

    /// Computes the mask, unless it is already computed.
    pub fn prepare(&mut self) {
        if self.next.is_none() {
            let begin = Instant::now();
            let next = Next::of(&mut self.matcher, self.vocab_size, &self.stop_ids);
            self.took = begin.elapsed();
            self.next = Some(next.map_err(|error| self.error(error)));
        }
    }

    /// Returns whether its masks are slow enough to compute on another thread.
    pub fn is_slow(&self) -> bool {
        self.next.is_none() && self.took > SLOW_MASK
    }

    /// Returns the allowed continuations.
    ///
    /// # Errors
    /// Returns [`ConstraintError`] if the sequence cannot continue.
    pub fn next(&mut self) -> Result<&Next, ConstraintError> {
        self.prepare();
        match &self.next {
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(error.clone()),
            None => Ok(&Next::End),
        }
    }

    /// Returns up to `limit` tokens that the grammar forces, the longest ones that fit; empty if there is a choice or
    /// masks are slow. The model may tokenize the same text differently, so these are drafts.
    pub fn forced(&mut self, limit: usize) -> Vec<u32> {
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
        // A shallow copy shares tables with the lookahead matcher only.
        let Some(mut lookahead) = self.lookahead().map(|lookahead| lookahead.clone()) else { return tokens };
        while let Some(token) = next.filter(|_| tokens.len() < limit) {
            tokens.push(token);
            if lookahead.consume_token(token).is_err() || lookahead.is_stopped() {
                break;
            }
            next = Next::of(&mut lookahead, vocab_size, &stop_ids).ok().and_then(|next| self.longest(&next));
        }
        tokens
    }

    /// Returns the lookahead matcher in the sequence's state; `None` if it has hit a limit.
    fn lookahead(&mut self) -> Option<&mut Matcher> {
        if let Lookahead::Unused = self.lookahead {
            self.lookahead = Lookahead::Active(Box::new(self.matcher.deep_clone()), Vec::new());
        }
        if let Lookahead::Active(matcher, pending) = &mut self.lookahead {
            let consumed = matcher.consume_tokens(pending);
            pending.clear();
            if consumed.is_err() || matcher.is_error() {
                self.lookahead = Lookahead::Failed;
            }
        }
        match &mut self.lookahead {
            Lookahead::Active(matcher, _) => Some(matcher),
            Lookahead::Unused | Lookahead::Failed => None,
        }
    }

    /// Returns the longest of the allowed tokens, if all others are prefixes of it.
    fn longest(&self, next: &Next) -> Option<u32> {
        let Next::Tokens(mask) = next else { return None };
        if mask.count() > MAX_FORCED_ALTERNATIVES {
            return None;
        }
        let environment = self.matcher.tok_env().ok()?;
        let bytes = |token: u32| environment.tok_trie().token(token);
        let longest = mask.tokens().max_by_key(|&token| bytes(token).len())?;
        mask.tokens().all(|token| bytes(longest).starts_with(bytes(token))).then_some(longest)
    }

    /// Returns how many leading tokens the grammar allows; 0 if unknown.
    pub fn allowed_prefix(&mut self, tokens: &[u32]) -> usize {
        if tokens.is_empty() {
            return 0;
        }
        let validated = self.lookahead().map(|lookahead| lookahead.validate_tokens(tokens));
        match validated {
            Some(Ok(count)) => count,
            Some(Err(_)) => {
                self.lookahead = Lookahead::Failed;
                0
            }
            None => 0,
        }
    }

    /// Consumes a token that is not a stop token. Returns the finish reason if the request ends with it.
    pub fn consume(&mut self, token: u32) -> Option<FinishReason> {
        self.next = None;
        if let Err(error) = self.matcher.consume_token(token) {
            return Some(FinishReason::Constraint(self.error(MatcherError::new(&error.to_string()))));
        }
        self.tokens += 1;
        if let Lookahead::Active(_, pending) = &mut self.lookahead {
            pending.push(token);
        }
        // The matcher stops if nothing can follow.
        self.matcher.is_stopped().then_some(FinishReason::Complete)
    }

    fn error(&self, error: MatcherError) -> ConstraintError {
        match error {
            MatcherError::NothingAllowed => ConstraintError::NothingAllowed { tokens: self.tokens },
            MatcherError::Matcher(reason) => ConstraintError::Matcher { tokens: self.tokens, reason },
        }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}
