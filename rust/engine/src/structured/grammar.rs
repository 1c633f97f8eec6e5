//! What a request asks for, checked and compiled.

use std::fmt;

use llguidance::api::{GrammarInit, GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use serde::Deserialize;

use super::constraint::{Next, Stuck};
use super::vocabulary::first_line;
use super::{GrammarError, lark, limits, schema};

/// What the output must be. Texts are as the caller wrote them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum StructuredOutputs {
    /// JSON that a schema (<https://json-schema.org>) allows.
    Json {
        /// The schema, as JSON.
        schema: String,
        /// Between the parts.
        #[serde(default)]
        whitespace: Whitespace,
    },
    /// Text that matches a regular expression as a whole.
    Regex {
        /// In Rust's syntax (<https://docs.rs/regex/latest/regex/#syntax>), without look-around.
        pattern: String,
    },
    /// One of some texts.
    Choice {
        /// The texts, none of them empty.
        choices: Vec<String>,
    },
    /// Text that a context-free grammar derives.
    Grammar {
        /// In Lark's syntax, as `llguidance` reads it.
        grammar: String,
    },
    /// Free text with parts that have a structure, each between a begin and an end.
    StructuralTag {
        /// JSON of the kind that vLLM's `structural_tag` takes.
        tag: String,
    },
}

/// White space between the parts of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Whitespace {
    /// Up to 32 characters of it in each place.
    #[default]
    Some,
    /// None at all.
    None,
    /// What a regular expression matches, in each place or nothing.
    Pattern(String),
}

impl StructuredOutputs {
    /// Reads a description written as JSON.
    ///
    /// # Errors
    /// [`GrammarError::Malformed`].
    pub fn from_json(text: &str) -> Result<Self, GrammarError> {
        serde_json::from_str(text).map_err(|error| GrammarError::Malformed(error.to_string()))
    }

    /// The parameter's name, for errors.
    pub(super) fn field(&self) -> &'static str {
        match self {
            Self::Json { .. } => "structured_outputs.json",
            Self::Regex { .. } => "structured_outputs.regex",
            Self::Choice { .. } => "structured_outputs.choice",
            Self::Grammar { .. } => "structured_outputs.grammar",
            Self::StructuralTag { .. } => "structured_outputs.structural_tag",
        }
    }

    /// What was given, for errors.
    pub(super) fn shown(&self) -> String {
        const LENGTH: usize = 64;
        let text = match self {
            Self::Json { schema: text, .. }
            | Self::Regex { pattern: text }
            | Self::Grammar { grammar: text }
            | Self::StructuralTag { tag: text } => text.clone(),
            Self::Choice { choices } => choices.join(", "),
        };
        let line: String = text.chars().take(LENGTH).map(|each| if each.is_control() { ' ' } else { each }).collect();
        if text.chars().nth(LENGTH).is_some() { format!("{line}…") } else { line }
    }

    /// Checks what can be told without compiling.
    pub(super) fn check(&self) -> Result<(), GrammarError> {
        let field = self.field();
        match self {
            Self::Json { schema, whitespace } => {
                if let Whitespace::Pattern(pattern) = whitespace {
                    limits::check_regex("structured_outputs.whitespace_pattern", pattern)?;
                }
                limits::check_json(field, schema)
            }
            Self::Regex { pattern } => limits::check_regex(field, pattern),
            Self::Choice { choices } => limits::check_choices(field, choices),
            Self::Grammar { grammar } => limits::check_lark(field, grammar),
            Self::StructuralTag { tag } => limits::check_json(field, tag),
        }
    }

    /// A matcher at the beginning of the output, or why there is none.
    pub(super) fn compile(&self, factory: &ParserFactory, vocab_size: usize) -> Result<Matcher, String> {
        let grammar = match self {
            Self::Json { schema, whitespace } => GrammarWithLexer::from_json_schema(schema::read(schema, whitespace)?),
            Self::Regex { pattern } => GrammarWithLexer::from_regex(lark::unanchored(pattern)?),
            Self::Choice { choices } => GrammarWithLexer::from_lark(lark::one_of(choices)?),
            Self::Grammar { grammar } => GrammarWithLexer::from_lark(lark::prepared(grammar)?),
            Self::StructuralTag { tag } => GrammarWithLexer::from_lark(lark::structural_tag(tag)?),
        };
        let limits = match self {
            Self::Grammar { .. } => limits::of_grammar(factory.limits()),
            _ => factory.limits().clone(),
        };
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_grammar(grammar));
        let quiet = Logger::new(0, 0);
        let parser = factory.create_parser_from_init_ext(grammar, quiet, InferenceCapabilities::default(), limits);
        let mut matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(error);
        }
        // What the compiler lets pass with a warning it does not follow.
        if let Some(warning) = matcher.grammar_warnings().first() {
            return Err(first_line(warning));
        }
        // The first mask shows whether there is any output at all, and every sequence begins with it.
        match Next::of(&mut matcher, vocab_size, &[]) {
            Ok(Next::Tokens(_)) => take_first_steps(matcher.deep_clone(), vocab_size).map(|()| matcher),
            Ok(Next::End) => Err("nothing but the empty text satisfies it".into()),
            Err(Stuck::NothingAllowed) => Err("no output satisfies it that the model has tokens for".into()),
            Err(Stuck::Matcher(reason)) => Err(reason),
        }
    }
}

/// What dies at once is refused, and not queued.
fn take_first_steps(mut matcher: Matcher, vocab_size: usize) -> Result<(), String> {
    const STEPS: usize = 4;
    let environment = matcher.tok_env().map_err(|error| error.to_string())?;
    for _ in 0..STEPS {
        let mask = match Next::of(&mut matcher, vocab_size, &[]) {
            Ok(Next::Tokens(mask)) => mask,
            Err(Stuck::Matcher(reason)) => return Err(reason),
            Ok(Next::End) | Err(Stuck::NothingAllowed) => break,
        };
        // White space leads nowhere.
        let leads = |&token: &u32| !environment.tok_trie().token(token).trim_ascii().is_empty();
        let Some(token) = mask.tokens().find(leads).or_else(|| mask.tokens().next()) else { break };
        matcher.consume_token(token).map_err(|error| first_line(&error.to_string()))?;
        if matcher.is_stopped() {
            break;
        }
    }
    Ok(())
}

/// What a request asked for, ready to be followed by any number of sequences.
pub struct Grammar {
    asked: StructuredOutputs,
    /// At the beginning of the output; sequences walk copies of it.
    matcher: Matcher,
    vocab_size: usize,
}

impl Grammar {
    pub(super) fn new(asked: StructuredOutputs, matcher: Matcher, vocab_size: usize) -> Self {
        Self { asked, matcher, vocab_size }
    }

    /// What was asked for.
    #[must_use]
    pub fn asked(&self) -> &StructuredOutputs {
        &self.asked
    }

    /// Tokens of the vocabulary that it was compiled for.
    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// A matcher of a sequence's own, tables included: what a neighbour fills in his cannot count against its limits.
    pub(super) fn matcher(&self) -> Matcher {
        self.matcher.deep_clone()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("asked", &self.asked).finish_non_exhaustive()
    }
}

impl PartialEq for Grammar {
    /// Whether both ask for the same.
    fn eq(&self, other: &Self) -> bool {
        self.asked == other.asked && self.vocab_size == other.vocab_size
    }
}
