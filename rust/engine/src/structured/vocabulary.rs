//! The vocabulary: a trie of the bytes of the model's tokens, against which grammars are matched.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::{process, thread};

use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::limits::{Limits, STACK_BYTES};
use super::{Grammar, GrammarError, StructuredOutputs, VocabularyError};
use crate::engine::panic_message;

/// Maximum number of tokens: trie nodes have 24 bits for ids, and one more id stands for the end.
const MAX_TOKENS: usize = (1 << 24) - 2;
/// Maximum bytes of a usable token: a trie path is limited to 1024. Real vocabularies have no longer tokens.
const MAX_TOKEN_BYTES: usize = 1000;
/// Number of cached compiled grammars.
const MAX_CACHED_GRAMMARS: usize = 32;

/// Contents of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// Bytes of text; empty for an unused id, which is never sampled.
    Text(Vec<u8>),
    /// A named special token such as `<|im_end|>`: text never matches it, but a grammar can refer to it.
    Special(Vec<u8>),
}

/// The tokens of a model, and a cache of compiled grammars.
///
/// # Examples
/// ```
/// use ferrule_engine::{StructuredOutputs, Vocabulary, structured::Token};
///
/// let tokens: Vec<Token> = (0..=255).map(|byte| Token::Text(vec![byte])).collect();
/// let vocabulary = Vocabulary::new(&tokens).unwrap();
/// let choice = StructuredOutputs::from_json(r#"{"type": "choice", "choices": ["yes", "no"]}"#).unwrap();
/// let grammar = vocabulary.compile(&choice).unwrap();
/// assert_eq!(grammar.source(), &choice);
///
/// let regex = StructuredOutputs::Regex { pattern: "(".into() };
/// assert!(vocabulary.compile(&regex).is_err());
/// ```
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
    size: usize,
    /// Most recently used first.
    compiled: Mutex<VecDeque<Arc<Grammar>>>,
    limits: Limits,
    overdue: Arc<OverdueCompilations>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Creates a vocabulary of tokens in the order of their ids. Takes half a second for a hundred thousand tokens.
    ///
    /// # Errors
    /// Returns [`VocabularyError`] if there are too many tokens, or they cannot form a trie.
    pub fn new(tokens: &[Token]) -> Result<Self, VocabularyError> {
        Self::with_limits(tokens, Limits::default())
    }

    pub(super) fn with_limits(tokens: &[Token], limits: Limits) -> Result<Self, VocabularyError> {
        let size = tokens.len();
        if size > MAX_TOKENS {
            return Err(VocabularyError::TooLarge { tokens: size, limit: MAX_TOKENS });
        }
        let mut words: Vec<Vec<u8>> = tokens.iter().map(Token::word).collect();
        // One more token stands for the end, whichever stop tokens a request has.
        words.push(Vec::new());
        let make = || -> Result<ParserFactory, String> {
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, size as u32), &words);
            // The canonical tokenization is not known here: any tokenization of a text is allowed.
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::json_slices();
            let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
            let mut factory = factory.map_err(|error| error.to_string())?;
            factory.quiet();
            *factory.limits_mut() = limits.parser.clone();
            Ok(factory)
        };
        let made = catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
        let factory = Arc::new(made.map_err(VocabularyError::Unusable)?);
        Ok(Self { factory, size, compiled: Mutex::default(), limits, overdue: Arc::default() })
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Compiles a constraint; recently compiled grammars are cached.
    ///
    /// # Errors
    /// Returns [`GrammarError`], at the latest shortly after the compilation time limit.
    pub fn compile(&self, source: &StructuredOutputs) -> Result<Arc<Grammar>, GrammarError> {
        if let Some(grammar) = self.cached(source) {
            return Ok(grammar);
        }
        source.check()?;
        let matcher = self.compile_in_time(source)?;
        let grammar = Arc::new(Grammar::new(source.clone(), matcher, self.size));
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.push_front(Arc::clone(&grammar));
        compiled.truncate(MAX_CACHED_GRAMMARS);
        Ok(grammar)
    }

    fn cached(&self, source: &StructuredOutputs) -> Option<Arc<Grammar>> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let place = compiled.iter().position(|grammar| grammar.source() == source)?;
        let grammar = compiled.remove(place)?;
        compiled.push_front(Arc::clone(&grammar));
        Some(grammar)
    }

    /// Compiles on a thread with a stack for nested schemas. An overdue compilation is abandoned; it ends at a limit of
    /// work.
    fn compile_in_time(&self, source: &StructuredOutputs) -> Result<Matcher, GrammarError> {
        let field = source.field();
        let refused = |reason: String| GrammarError::Refused { field, given: source.shown(), reason };
        let Limits { compile_time, max_overdue, .. } = self.limits;
        if self.overdue.count() >= max_overdue {
            return Err(GrammarError::Busy { field, limit: max_overdue });
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let (factory, size) = (Arc::clone(&self.factory), self.size);
        let (overdue, given) = (Arc::clone(&self.overdue), source.clone());
        // Set by whichever comes first: the end of the thread, or the timeout of the caller.
        let settled = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&settled);
        let work = move || {
            let compile = || given.compile(&factory, size);
            let compiled =
                catch_unwind(AssertUnwindSafe(compile)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
            // The caller may have timed out.
            _ = sender.send(compiled);
            if done.swap(true, Ordering::Relaxed) {
                overdue.add(-1);
            }
        };
        let thread = thread::Builder::new().name("ferrule-grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|error| refused(format!("cannot start a compiler thread: {error}")))?;
        match receiver.recv_timeout(compile_time) {
            Ok(compiled) => compiled.map_err(|reason| refused(first_line(&reason))),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(refused("the compiler failed".into())),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.overdue.add(1);
                if settled.swap(true, Ordering::Relaxed) {
                    self.overdue.add(-1);
                }
                Err(GrammarError::TimeLimit { field, limit_seconds: compile_time.as_secs() })
            }
        }
    }
}

/// Number of abandoned compilations still running. The count belongs to a process: a forked child has none of its
/// parent's threads.
#[derive(Debug, Default)]
struct OverdueCompilations(AtomicU64);

impl OverdueCompilations {
    /// Returns the count.
    fn count(&self) -> usize {
        Self::of_this_process(self.0.load(Ordering::Relaxed)) as usize
    }

    fn add(&self, change: i32) {
        let changed = |value| {
            let count = Self::of_this_process(value).saturating_add_signed(change);
            Some(u64::from(process::id()) << 32 | u64::from(count))
        };
        _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }

    /// Returns the count in the lower half if the upper half is this process's id.
    fn of_this_process(value: u64) -> u32 {
        if value >> 32 == u64::from(process::id()) { value as u32 } else { 0 }
    }
}

impl Token {
    /// Returns the token's bytes in the trie.
    fn word(&self) -> Vec<u8> {
        match self {
            Self::Text(bytes) | Self::Special(bytes) if bytes.len() > MAX_TOKEN_BYTES => Vec::new(),
            // Text that starts with the special token marker would be confused with one; it is not UTF-8, so no grammar
            // needs it.
            Self::Text(bytes) if bytes.len() > 1 && bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER => Vec::new(),
            Self::Text(bytes) => bytes.clone(),
            Self::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_slice()].concat(),
        }
    }
}

/// Shortens a compiler message: no diagrams or backtraces.
pub(super) fn first_line(message: &str) -> String {
    const LENGTH: usize = 400;
    if message.contains("coerce_one_of") {
        return "oneOf is supported only if its options are mutually exclusive; use anyOf".into();
    }
    let lines =
        message.lines().take_while(|line| !line.starts_with('<')).map(str::trim).filter(|line| !line.is_empty());
    lines.take(2).collect::<Vec<_>>().join("; ").chars().take(LENGTH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_another_process_are_ignored() {
        let overdue = OverdueCompilations::default();
        overdue.add(1);
        overdue.add(1);
        overdue.add(-1);
        assert_eq!(overdue.count(), 1);
        let parent_count = u64::from(process::id() + 1) << 32 | 4;
        overdue.0.store(parent_count, Ordering::Relaxed);
        assert_eq!(overdue.count(), 0);
        overdue.add(1);
        assert_eq!(overdue.count(), 1);
    }
}
