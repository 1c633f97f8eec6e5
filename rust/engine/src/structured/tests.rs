//! Tests of structured output over a vocabulary of single bytes and a few longer tokens, including limits on hostile
//! grammars.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::limits::Limits;
use super::*;
use crate::FinishReason;

/// Stop token of these tests.
const STOP: u32 = 256;

/// Tokens longer than one byte.
const LONGER: [&str; 9] = ["{\"", "\":", "true", "  ", "aa", "ab", "\",\"", "12", "é"];
/// Id of the first of them.
const FIRST_LONGER: usize = 259;

/// Returns the bytes of a text token.
fn bytes_of(token: u32) -> Vec<u8> {
    u8::try_from(token).map_or_else(|_| LONGER[token as usize - FIRST_LONGER].into(), |byte| vec![byte])
}

fn vocabulary() -> Vocabulary {
    with_limits(Limits::default())
}

/// Creates a vocabulary of all bytes, a special stop token, another special token, an unused id, and longer tokens.
fn with_limits(limits: Limits) -> Vocabulary {
    let bytes = (0..=255).map(|byte| Token::Text(vec![byte]));
    let marks = [Token::Special(b"<|end|>".into()), Token::Special(b"<|tool|>".into()), Token::Text(Vec::new())];
    let longer = LONGER.map(|text| Token::Text(text.into()));
    Vocabulary::with_limits(&bytes.chain(marks).chain(longer).collect::<Vec<_>>(), limits).unwrap()
}

fn json(schema: &str) -> StructuredOutputs {
    StructuredOutputs::Json { schema: schema.into(), whitespace: Whitespace::Some }
}

fn regex(pattern: &str) -> StructuredOutputs {
    StructuredOutputs::Regex { pattern: pattern.into() }
}

fn grammar(grammar: &str) -> StructuredOutputs {
    StructuredOutputs::Grammar { grammar: grammar.into() }
}

fn start(asked: &StructuredOutputs) -> Constraint {
    Constraint::new(&vocabulary().compile(asked).unwrap(), &[STOP])
}

fn allowed(constraint: &mut Constraint) -> Vec<u32> {
    match constraint.next().unwrap() {
        Next::Tokens(mask) => mask.tokens().collect(),
        Next::End => Vec::new(),
    }
}

/// Returns whether the constraint accepts a text as the whole output, byte by byte, then a stop token or nothing.
fn derives(asked: &StructuredOutputs, text: &str) -> bool {
    let mut constraint = start(asked);
    let last = text.len() - 1;
    for (place, &byte) in text.as_bytes().iter().enumerate() {
        if !allowed(&mut constraint).contains(&u32::from(byte)) {
            return false;
        }
        match constraint.consume(byte.into()) {
            Some(FinishReason::Complete) => return place == last,
            Some(other) => panic!("{other:?}"),
            None => {}
        }
    }
    let next = allowed(&mut constraint);
    next.is_empty() || next.contains(&STOP)
}

#[test]
fn each_constraint_type_accepts_matching_text_only() {
    let schema =
        r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#;
    let choices = |choices: &[&str]| StructuredOutputs::Choice { choices: choices.iter().map(|&c| c.into()).collect() };
    let tag = r#"{"type":"structural_tag","structures":[{"begin":"<f=x>","schema":{"type":"integer"},"end":"</f>"}],
        "triggers":["<f="]}"#;
    let tag = StructuredOutputs::StructuralTag { tag: tag.into() };
    let two = r#"{"structures":[{"begin":"<f=a>","schema":{"type":"integer"},"end":"</f>"},
        {"begin":"<f=b>","schema":{"type":"boolean"},"end":"</f>"}],"triggers":["<f="]}"#;
    let two = StructuredOutputs::StructuralTag { tag: two.into() };
    for (asked, texts, others) in [
        (two, vec!["<f=a>1</f>", "x <f=b>true</f><f=a>-2</f> y"], vec!["<f=a>true", "<f=b>1", "<f=c"]),
        (
            json(schema),
            vec![r#"{"a":1}"#, "{ \"a\" :\n-20 }"],
            vec![r#"{}"#, r#"{"a":1.5}"#, r#"{"b":1}"#, r#"{"a":1"#],
        ),
        (json("true"), vec!["null", "[1, {\"x\": []}]", "-1.5e3"], vec!["nul", "[1", "01"]),
        (regex("^[a-c]+(x|é)$"), vec!["abx", "cé"], vec!["x", "ab", "abxx"]),
        (regex(r"a/b\d{2}"), vec!["a/b12"], vec!["a/b1", "a/b123"]),
        (choices(&["a", "ab", "\"q\"", "\n"]), vec!["a", "ab", "\"q\"", "\n"], vec!["b", "abb", "\"q"]),
        (grammar("start: \"(\" start \")\" | \"x\""), vec!["x", "((x))"], vec!["(x", "x)"]),
        (tag, vec!["hi", "a <f=x>12</f> b", "<f=x>1</f><f=x>2</f>"], vec!["<f=y>", "<f=x>a", "a <f=x>1</f"]),
    ] {
        for text in texts {
            assert!(derives(&asked, text), "{asked:?} {text:?}");
        }
        for text in others {
            assert!(!derives(&asked, text), "{asked:?} {text:?}");
        }
    }
}

#[test]
fn integers_of_64_bits_are_supported() {
    let int64 = format!(r#"{{"type":"integer","minimum":{},"maximum":{}}}"#, i64::MIN, i64::MAX);
    for number in ["0", "-1", "9223372036854774784", "-9223372036854774784", "-123456789012345678"] {
        assert!(derives(&json(&int64), number), "{number}");
        assert!(derives(&grammar(&format!("start: %json {int64}")), number), "{number}");
    }
    for number in ["9223372036854775808", "-9223372036854775809", "10000000000000000000"] {
        assert!(!derives(&json(&int64), number), "{number}");
    }
    let large = json(r#"{"type":"integer","minimum":4000000000000000000}"#);
    assert!(derives(&large, "4000000000000000000") && !derives(&large, "3999999999999999999"));
}

#[test]
fn whitespace_is_bounded_or_as_configured() {
    let with = |whitespace| StructuredOutputs::Json { schema: r#"{"type":"array"}"#.into(), whitespace };
    let spaces = |count: usize| format!("[{}1]", " ".repeat(count));
    assert!(derives(&with(Whitespace::Some), &spaces(32)) && !derives(&with(Whitespace::Some), &spaces(33)));
    assert!(derives(&with(Whitespace::None), "[1,2]") && !derives(&with(Whitespace::None), "[1, 2]"));
    let two = with(Whitespace::Pattern(" {2}".into()));
    assert!(derives(&two, "[  1,2]") && !derives(&two, "[ 1]"));
}

#[test]
fn stop_tokens_are_allowed_only_where_the_output_may_end() {
    let mut constraint = start(&regex("a+|b"));
    assert!(!allowed(&mut constraint).contains(&STOP));
    assert_eq!(constraint.consume(b'a'.into()), None);
    let next = allowed(&mut constraint);
    assert!(next.contains(&STOP) && next.contains(&u32::from(b'a')) && !next.contains(&u32::from(b'b')));
    // A stop token with bytes does not match grammar text.
    let compiled = vocabulary().compile(&regex("a(b|c)?")).unwrap();
    let mut constraint = Constraint::new(&compiled, &[b'b'.into(), STOP]);
    assert!(!allowed(&mut constraint).contains(&u32::from(b'b')));
    assert_eq!(constraint.consume(b'a'.into()), None);
    assert_eq!(allowed(&mut constraint), [b'b'.into(), b'c'.into(), STOP]);
}

#[test]
fn the_output_ends_where_nothing_can_follow() {
    let mut constraint = start(&regex("a+|b"));
    assert_eq!(constraint.consume(b'b'.into()), Some(FinishReason::Complete));
    // Also where the only continuation is a stop token of the request.
    let compiled = vocabulary().compile(&regex("x<?")).unwrap();
    let mut constraint = Constraint::new(&compiled, &[b'<'.into()]);
    assert_eq!(constraint.consume(b'x'.into()), None);
    assert_eq!(constraint.next(), Ok(&Next::End));
}

#[test]
fn special_tokens_match_no_text_but_can_be_named() {
    let mark = 257;
    let mut constraint = start(&regex("(?s:.*)"));
    let next = allowed(&mut constraint);
    assert!(!next.contains(&mark) && !next.contains(&258), "a mark, or what stands for nothing");
    let mut constraint = start(&grammar("start: <|tool|> \"a\""));
    assert_eq!(allowed(&mut constraint), [mark]);
}

#[test]
fn sequences_of_one_grammar_do_not_share_lexer_tables() {
    let vocabulary = vocabulary();
    let compiled = vocabulary.compile(&json("true")).unwrap();
    assert!(std::sync::Arc::ptr_eq(&compiled, &vocabulary.compile(&json("true")).unwrap()), "compiled twice");
    let mut one = Constraint::new(&compiled, &[STOP]);
    let mut other = Constraint::new(&compiled, &[STOP]);
    let before = allowed(&mut other);
    for byte in b"[\"x\",{\"y\":1." {
        one.next().unwrap();
        assert_eq!(one.consume((*byte).into()), None);
    }
    other.prepare();
    assert_eq!(allowed(&mut other), before);
}

#[test]
fn forced_tokens_are_proposed_and_change_no_mask() {
    let schema = r#"{"type":"object","properties":{"name":{"enum":["true","x"]}},"required":["name"],
        "additionalProperties":false}"#;
    let asked = StructuredOutputs::Json { schema: schema.into(), whitespace: Whitespace::None };
    let (mut one, mut other) = (start(&asked), start(&asked));
    let written = |tokens: &[u32]| tokens.iter().map(|&token| bytes_of(token)).collect::<Vec<_>>().concat();
    assert_eq!(written(&one.forced(15)), b"{\"name\":\"");
    assert!(one.forced(15).len() < 9, "the longest tokens that fit");
    assert_eq!(one.forced(3).len(), 3);
    assert_eq!(one.allowed_prefix(&[b'{'.into(), b'"'.into(), b'm'.into()]), 2);
    for &byte in b"{\"name\":\"true\"}" {
        one.forced(15);
        one.allowed_prefix(&[byte.into(), byte.into()]);
        assert_eq!(one.next(), other.next());
        assert_eq!(one.consume(byte.into()), other.consume(byte.into()));
    }
    assert!(start(&regex("a|b")).forced(15).is_empty());
}

/// Lookahead counts against no limit of the sequence and never ends it.
#[test]
fn lookahead_uses_separate_limits() {
    let mut limits = Limits::default();
    limits.parser.max_lexer_states = 600;
    let compiled = with_limits(limits).compile(&regex("[ab]*a[ab]{40}c")).unwrap();
    let (mut one, mut other) = (Constraint::new(&compiled, &[STOP]), Constraint::new(&compiled, &[STOP]));
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::from(b'a') + (random >> 60) as u32 % 2
    };
    let (mut lost, mut tokens) = (false, 0);
    // Up to the limit of the sequence's own tokens, which is the same for both.
    for _ in 0..2000 {
        let drafts: Vec<u32> = (0..60).map(|_| next()).collect();
        lost |= one.allowed_prefix(&drafts) < 60;
        one.forced(15);
        assert_eq!(one.next(), other.next());
        let token = next();
        let (ended, as_well) = (one.consume(token), other.consume(token));
        assert_eq!(ended, as_well);
        if ended.is_some() {
            break;
        }
        tokens += 1;
    }
    assert!(lost, "no drafts has met a limit");
    assert!(tokens > 30, "{tokens}");
}

#[test]
fn lookahead_follows_the_sequence() {
    let mut constraint = start(&grammar("start: \"ab\" /[0-9]/ \"{\\\"x\\\":\" start?"));
    for _ in 0..3 {
        assert_eq!(constraint.allowed_prefix(&[b'a'.into(), b'b'.into(), b'5'.into(), b'5'.into()]), 3);
        for byte in b"ab7" {
            constraint.next().unwrap();
            assert_eq!(constraint.consume((*byte).into()), None);
        }
        let forced = constraint.forced(15);
        assert_eq!(forced.iter().flat_map(|&token| bytes_of(token)).collect::<Vec<_>>(), b"{\"x\":");
        for token in forced {
            assert_eq!(constraint.consume(token), None);
        }
    }
}

/// Overdue compilations continue in the background, a few at once, and end.
#[test]
fn compilations_are_limited_in_time_and_number() {
    let limits = Limits { compile_time: Duration::from_millis(2), max_overdue: 2, ..Limits::default() };
    let vocabulary = with_limits(limits);
    let slow = |index: usize| regex(&format!("{}{index}", "a*b?".repeat(900)));
    let error = vocabulary.compile(&slow(0)).unwrap_err();
    assert!(matches!(error, GrammarError::TimeLimit { .. }), "{error}");
    assert!(matches!(vocabulary.compile(&slow(1)), Err(GrammarError::TimeLimit { .. })));
    let error = vocabulary.compile(&regex("a")).unwrap_err();
    assert_eq!(error, GrammarError::Busy { field: "structured_outputs.regex", limit: 2 });
    // They end at the limits of work.
    let begin = Instant::now();
    while matches!(vocabulary.compile(&regex("a")), Err(GrammarError::Busy { .. })) {
        assert!(begin.elapsed() < Duration::from_secs(60), "still busy");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A batch waits for the masks of all sequences, so an ambiguous grammar must end while its masks are fast.
#[test]
fn an_ambiguous_grammar_does_not_delay_the_batch() {
    let ambiguous = "start: e\ne: e e | \"a\" | \"b\" | e \"+\" e | \"(\" e \")\" | e e e";
    let mut constraint = start(&grammar(ambiguous));
    for step in 0..160 {
        let begin = Instant::now();
        let next = constraint.next().cloned();
        assert!(begin.elapsed() < Duration::from_secs(1), "{step}: {:?}", begin.elapsed());
        assert!(next.is_ok_and(|next| matches!(next, Next::Tokens(mask) if mask.allows(b'a'.into()))));
        if let Some(reason) = constraint.consume(b'a'.into()) {
            let FinishReason::Constraint(error) = reason else { panic!("{reason:?}") };
            assert!(error.to_string().contains("items; max is 800"), "{error}");
            return;
        }
    }
    panic!("went on");
}

#[test]
fn a_matcher_panic_ends_only_its_sequence() {
    let mut constraint = start(&regex("ab"));
    let Some(FinishReason::Constraint(error)) = constraint.consume(b'z'.into()) else { panic!("went on") };
    assert!(error.to_string().contains("after 0 output tokens"), "{error}");
    assert!(constraint.next().is_err() && start(&regex("ab")).next().is_ok());
}

/// Invalid, unsatisfiable or oversized constraints are rejected quickly and with the reason.
#[test]
fn invalid_constraints_are_rejected_with_the_reason() {
    let vocabulary = vocabulary();
    let nested = |open: &str, close: &str, count: usize| format!("{}true{}", open.repeat(count), close.repeat(count));
    let wide = (0..1001).map(|index| format!("\"p{index}\":{{}}")).collect::<Vec<_>>().join(",");
    let chain = |count: usize| {
        let links =
            (0..count).map(|index| format!("\"d{index}\":{{\"items\":{{\"$ref\":\"#/$defs/d{}\"}}}}", index + 1));
        format!("{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{}}}}}", links.collect::<Vec<_>>().join(","))
    };
    let rules = |count: usize| (0..count).map(|index| format!("r{index}: r{}\n", index + 1)).collect::<String>();
    let patterns = |count: usize| {
        let one = |index: usize| format!("{{\"type\":\"string\",\"pattern\":\".*[a-c]{{{index}}}x.*\"}},");
        (0..count).map(one).collect::<String>()
    };
    let doubled = (0..40).map(|index| format!("T{index}: T{0} T{0}\n", index + 1)).collect::<String>();
    let product = format!(
        r#"{{"allOf":[{}]}}"#,
        (0..20)
            .map(|index| {
                let option = |name| format!(r#"{{"properties":{{"{name}{index}":{{"type":"integer"}}}}}}"#);
                format!(r#"{{"anyOf":[{},{},{}]}}"#, option("a"), option("b"), option("c"))
            })
            .collect::<Vec<_>>()
            .join(",")
    );
    for (asked, reason) in [
        (json("{"), "EOF"),
        (json("3"), "a schema must be an object"),
        (json("false"), "false"),
        (json(r#"{"type":"nonsense"}"#), "nonsense"),
        (json(r#"{"type":"integer","minimum":5,"maximum":3}"#), "minimum (5)"),
        (json(r#"{"type":"array","uniqueItems":true}"#), "uniqueItems"),
        (json(r#"{"type":"string","format":"nonsense"}"#), "nonsense"),
        (json(r#"{"oneOf":[{"type":"integer"},{"type":"number"}]}"#), "oneOf"),
        (json(r#"{"x-guidance":{"lenient":true}}"#), "x-guidance"),
        (json(r##"{"$ref":"#/$defs/x"}"##), "$defs"),
        (json(r#"{"$ref":"https://example.com/schema"}"#), "https://example.com"),
        (json(r##"{"$ref":"#"}"##), "no output"),
        (json(r##"{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}"##), ""),
        (json(&nested("{\"not\":", "}", 100_000)), "100"),
        (json(&nested("{\"items\":", "}", 101)), "100"),
        (json(&format!("{{\"properties\":{{{wide}}}}}")), "1001"),
        (json(&chain(5000)), "levels"),
        (json(&product), "too large"),
        (json(r#"{"type":"integer","multipleOf":1000003}"#), "1000003"),
        (json(r#"{"type":"number","multipleOf":0}"#), "multiple"),
        (json(&format!("{{\"properties\":{{{}}}}}", &wide[..wide.find(",\"p481\"").unwrap()])), "480"),
        (json(&format!("{{\"enum\":[{}1]}}", "{},".repeat(25_000))), "25000"),
        (json(&format!("{{\"allOf\":[{}true]}}", patterns(40))), "patterns"),
        (json(r#"{"type":"integer","minimum":1e19}"#), "9223372036854774784"),
        (grammar(r#"start: %json {"type":"integer","multipleOf":10000019}"#), "10000019"),
        (grammar(r#"start: %json {"x-guidance":{"lenient":true}}"#), "x-guidance.lenient"),
        (grammar("root ::= \"a\" | \"b\" root"), "Lark's syntax is expected"),
        (grammar(&format!("start: A\nA: {}", "\"a\"? ".repeat(8000))), "8000 parts"),
        (regex(&"a?".repeat(30_000)), "30000 parts"),
        (regex(&r"\w".repeat(30_000)), "30000 classes"),
        // The limit is hit after the first token.
        (grammar(&format!("start: \"x\" ({}\"y\")", "\"a\"? ".repeat(2000))), "items"),
        (json(&format!("{{\"description\":\"{}\"}}", "x".repeat(1 << 20))), "1048576"),
        (regex("("), "regex"),
        (regex(r"a\"), "backslash"),
        (regex(""), "empty"),
        (regex("(?=a)b"), "regex"),
        (regex("[a&&b]"), "no output"),
        (regex(&("(".repeat(30_000) + &")".repeat(30_000))), "regex"),
        (regex(&"a".repeat(65_537)), "65537"),
        (StructuredOutputs::Choice { choices: vec![] }, "1 to 10000"),
        (StructuredOutputs::Choice { choices: vec!["a".into(); 10_001] }, "10001"),
        (StructuredOutputs::Choice { choices: vec![String::new()] }, "empty"),
        (grammar(""), "start"),
        (grammar("start: x"), "unknown name"),
        (grammar("start: start"), "no output"),
        (grammar("start: A\nA: B\nB: A"), "circular"),
        (grammar(&("start: ".to_owned() + &"(".repeat(30_000))), "nested"),
        (grammar(&(doubled + "T40: \"b\"\nstart: T0\n")), "too "),
        (grammar(&rules(20_000)), "65536"),
        (StructuredOutputs::StructuralTag { tag: r#"{"structures":[],"triggers":[]}"#.into() }, "structures"),
    ] {
        let begin = Instant::now();
        let compiled = vocabulary.compile(&asked);
        let shown = asked.shown();
        if reason.is_empty() {
            // Infinite, but the length limit ends it.
            assert!(compiled.is_ok(), "{shown}: {compiled:?}");
        } else {
            let error = compiled.expect_err(&shown).to_string();
            assert!(error.contains(reason) && error.contains(asked.field()), "{shown}: {error}");
            assert!(error.len() < 700, "{} bytes of message", error.len());
        }
        assert!(begin.elapsed() < Duration::from_secs(5), "{shown}: {:?}", begin.elapsed());
    }
}

/// Large but allowed constraints compile in time, and each mask stays within the limits of work.
#[test]
fn large_constraints_stay_within_the_limits() {
    let vocabulary = vocabulary();
    let options = (0..20_000).map(|index| format!("\"v{}\"", index * 7919)).collect::<Vec<_>>().join(",");
    let optional = (0..480).map(|index| format!("\"p{index}\":{{}}")).collect::<Vec<_>>().join(",");
    for asked in [
        json(&format!("{{\"properties\":{{{optional}}}}}")),
        json(r#"{"type":"string","minLength":1000000000}"#),
        json(r#"{"type":"array","items":{"type":"integer"},"minItems":1000000000}"#),
        json(r#"{"type":"string","pattern":"^(a+)+$","minLength":1000,"maxLength":100000}"#),
        json(&format!("{{\"enum\":[{options}]}}")),
        regex("a{1000000000}"),
        regex("((a{100}){100}){100}"),
        regex(".*a.{3000}b"),
        regex(&r"\p{L}{0,200}\w{0,300}\pN".repeat(10)),
        StructuredOutputs::Choice { choices: (0..10_000).map(|index| format!("c{index}")).collect() },
        grammar(
            &((0..3900).map(|index| format!("r{index}: r{} \"a\"\n", index + 1)).collect::<String>()
                + "r3900: \"b\"\nstart: r0\n"),
        ),
    ] {
        let compiled = vocabulary.compile(&asked).unwrap_or_else(|error| panic!("{error}"));
        let mut constraint = Constraint::new(&compiled, &[STOP]);
        for step in 0..40 {
            let begin = Instant::now();
            let next = match constraint.next() {
                Ok(Next::Tokens(mask)) => mask.tokens().nth(step % mask.count()),
                Ok(Next::End) | Err(_) => None,
            };
            assert!(begin.elapsed() < Duration::from_secs(5), "{}: {:?}", asked.shown(), begin.elapsed());
            let Some(token) = next.filter(|token| *token != STOP) else { break };
            if constraint.consume(token).is_some() {
                break;
            }
        }
    }
}

proptest! {
    /// Arbitrary text as a grammar is rejected or works, without a panic.
    #[test]
    fn arbitrary_grammars_do_not_panic(text in "[ -~\n]{0,60}", kind in 0..5) {
        let asked = match kind {
            0 => json(&text),
            1 => regex(&text),
            2 => grammar(&text),
            3 => grammar(&format!("start: {text}")),
            _ => StructuredOutputs::StructuralTag { tag: text },
        };
        if let Ok(compiled) = vocabulary().compile(&asked) {
            let mut constraint = Constraint::new(&compiled, &[STOP]);
            prop_assert!(!allowed(&mut constraint).is_empty());
        }
    }
}

/// Threads that compute masks have a stack for nested grammars, even with musl's default of 128 KiB.
#[test]
fn a_small_stack_is_enough() {
    let vocabulary = vocabulary();
    let rules = (0..3500).map(|index| format!("r{index}: \"x\" r{}\n", index + 1)).collect::<String>();
    let terminals = (0..1500).map(|index| format!("T{index}: \"x\" T{} | \"y\"\n", index + 1)).collect::<String>();
    for asked in [
        grammar(&(rules + "r3500: \"b\"\nstart: r0\n")),
        grammar(&(terminals + "T1500: \"b\"\nstart: T0\n")),
        json(&format!("{}true{}", "{\"items\":".repeat(99), "}".repeat(99))),
        regex(&format!("{}a{}", "(".repeat(100), ")*".repeat(100))),
        regex(&"(a|b)".repeat(10_000)),
        regex(".*a.{3000}b"),
        StructuredOutputs::Choice { choices: (0..6000).map(|index| format!("aaaaaa{index}")).collect() },
    ] {
        let compiled = vocabulary.compile(&asked).unwrap_or_else(|error| panic!("{error}"));
        let follow = move || {
            let mut constraint = Constraint::new(&compiled, &[STOP]);
            for step in 0..60 {
                let Ok(Next::Tokens(mask)) = constraint.next() else { break };
                let Some(token) = mask.tokens().filter(|&token| token != STOP).nth(step % 2) else { continue };
                constraint.forced(8);
                constraint.allowed_prefix(&[token; 8]);
                if constraint.consume(token).is_some() {
                    break;
                }
            }
        };
        std::thread::Builder::new().stack_size(128 << 10).spawn(follow).unwrap().join().unwrap();
    }
}
