from trt_kvcache.cli import console


def test_sizes_counts_and_spans():
    sizes = (0, 1023, 1024, 1536, 2**20, 2**30, 3 * 2**40, 5000 * 2**40)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "3.0 TiB", "5000.0 TiB"]
    assert [console.size(nbytes) for nbytes in sizes] == texts
    assert [console.count(number, "slot") for number in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
    assert (console.span(3, 3), console.span(3, 7)) == ("3", "3-7")


def test_results_go_to_stdout_and_all_else_to_stderr_in_unbroken_lines(capsys):
    line = "word " * 100 + "end"
    console.say(line)
    console.put("text")
    console.note("a note")
    console.warn("a danger")
    console.complain("error:", "a failure")
    with console.progress_bar() as report:
        report("a stage", 0.5)
    assert capsys.readouterr() == (f"{line}\ntext", "a note\nwarning: a danger\nerror: a failure\n")


def test_a_table_takes_texts_as_they_are(capsys):
    rows = console.table("name", "bytes", numbers=("bytes",))
    rows.add_row("[red]a :cat:", "7")
    rows.add_row("b", "1234567")
    console.results().print(rows)
    assert "│ [red]a :cat: │       7 │" in capsys.readouterr().out
