//! The fuzz target of structured outputs, run on its seeds and on random damage to them.

#[path = "../../../fuzz/grammar.rs"]
mod grammar;
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[test]
fn damaged_constraints_are_refused_or_compiled() {
    replay::replay("grammar", 1000, grammar::grammar);
}
