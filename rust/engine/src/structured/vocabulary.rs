//! The bytes of the model's tokens, as a tree that grammars are matched against.

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

/// Tokens whose ids the tree's nodes can name (24 bits, and one more id that stands for the end).
const MAX_TOKENS: usize = (1 << 24) - 2;
/// Bytes of a token that is used: a path in the tree is at most 1024 long. None of a real vocabulary is longer.
const MAX_TOKEN_BYTES: usize = 1000;
/// Grammars that are kept, so that requests alike compile theirs once.
const KEPT: usize = 32;

/// What a token stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// These bytes of text; none for an id that stands for nothing, which is never sampled.
    Text(Vec<u8>),
    /// A mark with a name, such as `<|im_end|>`: no text matches it, but a grammar can ask for it.
    Special(Vec<u8>),
}

/// The tokens of a model.
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
    size: usize,
    /// The latest ones first.
    compiled: Mutex<VecDeque<Arc<Grammar>>>,
    limits: Limits,
    late: Arc<Late>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// A vocabulary of these tokens, in the order of their ids. Takes half a second for a hundred thousand.
    ///
    /// # Errors
    /// [`VocabularyError`] if there are too many, or they make no tree.
    pub fn new(tokens: &[Token]) -> Result<Self, VocabularyError> {
        Self::with_limits(tokens, Limits::default())
    }

    pub(super) fn with_limits(tokens: &[Token], limits: Limits) -> Result<Self, VocabularyError> {
        let size = tokens.len();
        if size > MAX_TOKENS {
            return Err(VocabularyError::TooLarge { tokens: size, limit: MAX_TOKENS });
        }
        let mut words: Vec<Vec<u8>> = tokens.iter().map(Token::word).collect();
        // One more that stands for the end, whichever of the model's tokens a request takes for it.
        words.push(Vec::new());
        let make = || -> Result<ParserFactory, String> {
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, size as u32), &words);
            // How the model's own tokenizer would write a text is not known here: any way to write it is allowed.
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
        Ok(Self { factory, size, compiled: Mutex::default(), limits, late: Arc::default() })
    }

    /// Tokens, of which masks tell which may come next.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// What a request asks for, ready to be followed. The latest ones are kept.
    ///
    /// # Errors
    /// [`GrammarError`], within little more than the time that a compilation may take.
    pub fn compile(&self, asked: &StructuredOutputs) -> Result<Arc<Grammar>, GrammarError> {
        if let Some(grammar) = self.kept(asked) {
            return Ok(grammar);
        }
        asked.check()?;
        let matcher = self.compile_in_time(asked)?;
        let grammar = Arc::new(Grammar::new(asked.clone(), matcher, self.size));
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.push_front(Arc::clone(&grammar));
        compiled.truncate(KEPT);
        Ok(grammar)
    }

    fn kept(&self, asked: &StructuredOutputs) -> Option<Arc<Grammar>> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let place = compiled.iter().position(|grammar| grammar.asked() == asked)?;
        let grammar = compiled.remove(place)?;
        compiled.push_front(Arc::clone(&grammar));
        Some(grammar)
    }

    /// Compiles on a thread with a stack for nested schemas. One that is too late is left alone: it ends by itself, at
    /// a limit of work.
    fn compile_in_time(&self, asked: &StructuredOutputs) -> Result<Matcher, GrammarError> {
        let field = asked.field();
        let refused = |reason: String| GrammarError::Refused { field, given: asked.shown(), reason };
        let Limits { compile_time, max_late, .. } = self.limits;
        if self.late.count() >= max_late {
            return Err(GrammarError::Busy { field, limit: max_late });
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let (factory, size) = (Arc::clone(&self.factory), self.size);
        let (late, given) = (Arc::clone(&self.late), asked.clone());
        // Set by whoever is first: the thread that it is over, or the one that waits that it has given up.
        let settled = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&settled);
        let work = move || {
            let compile = || given.compile(&factory, size);
            let compiled =
                catch_unwind(AssertUnwindSafe(compile)).unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
            // Nobody may be there any more to whom it could be sent.
            _ = sender.send(compiled);
            if over.swap(true, Ordering::Relaxed) {
                late.add(-1);
            }
        };
        let thread = thread::Builder::new().name("ferrule-grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|error| refused(format!("no thread could be started: {error}")))?;
        match receiver.recv_timeout(compile_time) {
            Ok(compiled) => compiled.map_err(|reason| refused(first_line(&reason))),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(refused("the compiler failed".into())),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.late.add(1);
                if settled.swap(true, Ordering::Relaxed) {
                    self.late.add(-1);
                }
                Err(GrammarError::TimeLimit { field, limit_seconds: compile_time.as_secs() })
            }
        }
    }
}

/// Compilations that go on although nobody waits for them any more. A count is that of a process: the child of a fork
/// has none of its parent's threads, and none of them would ever be taken off.
#[derive(Debug, Default)]
struct Late(AtomicU64);

impl Late {
    /// How many there are.
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

    /// The count in the lower half, if the upper half says that it is this process's.
    fn of_this_process(value: u64) -> u32 {
        if value >> 32 == u64::from(process::id()) { value as u32 } else { 0 }
    }
}

impl Token {
    /// As the tree has it.
    fn word(&self) -> Vec<u8> {
        match self {
            Self::Text(bytes) | Self::Special(bytes) if bytes.len() > MAX_TOKEN_BYTES => Vec::new(),
            // Text that begins as marks do would be taken for one; it is no UTF-8, which no grammar asks for.
            Self::Text(bytes) if bytes.len() > 1 && bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER => Vec::new(),
            Self::Text(bytes) => bytes.clone(),
            Self::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_slice()].concat(),
        }
    }
}

/// What a compiler says, without its drawings and backtraces.
pub(super) fn first_line(message: &str) -> String {
    const LENGTH: usize = 400;
    if message.contains("coerce_one_of") {
        return "oneOf is supported where no two of its options can hold of the same value; anyOf is always".into();
    }
    let lines =
        message.lines().take_while(|line| !line.starts_with('<')).map(str::trim).filter(|line| !line.is_empty());
    lines.take(2).collect::<Vec<_>>().join("; ").chars().take(LENGTH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_counted_is_none_of_ours() {
        let late = Late::default();
        late.add(1);
        late.add(1);
        late.add(-1);
        assert_eq!(late.count(), 1);
        let of_the_parent = u64::from(process::id() + 1) << 32 | 4;
        late.0.store(of_the_parent, Ordering::Relaxed);
        assert_eq!(late.count(), 0);
        late.add(1);
        assert_eq!(late.count(), 1);
    }
}
